"""Policy `allocate`: the drafts of a step by what they bring and what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation._native import BatchCosts
from sglang_hvd.allocation._native import StepAllocator as _StepAllocator
from sglang_hvd.allocation.draft_extend import DraftExtend
from sglang_hvd.allocation.verify_widths import VerifyWidths
from sglang_hvd.costs import StepCosts

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

# After so many steps without any draft of the model drafter one request drafts with it, and
# likewise for cache drafts: what is expected of them could be wrong. Requests take turns.
_LOOK_AFTER = 256

# Tokens that the model drafter's KV cache typically lacks of a request that catches up when it
# drafts, some two cycles.
_TYPICAL_MISSING = 8

# Batch sizes whose costs are kept: each takes memory linear in it.
_MOST_BATCHES = 256

# Pace by which tokens and time are valued: recent^(1 - p) * own^p. p = 0: the latest steps alone;
# 1: this step alone.
OWN_PACE = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class DraftOdds:
    """What is expected of each request's drafts. Row i belongs to request i.

    probs: float32[num_requests, max_nodes], probability that a node of the cache draft is accepted,
        the most probable first; after its parent.
    depths: int32, same shape, from 1.
    num_nodes: int32[num_requests], 0 without a cache draft.
    reaches: float32[num_requests, num_sizes, num_steps], probability that at least 1, 2, ... tokens
        of the model drafter's draft are accepted, by its size.
    reaches_if_right: same shape; likewise, where the cache draft is right up to there.
    """

    probs: Float32
    depths: Int32
    num_nodes: Int32
    reaches: Float32
    reaches_if_right: Float32


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """The drafts of one step.

    num_cache: int32[num_requests], first nodes of each cache draft to verify.
    num_model: int32[num_requests], nodes of the model drafter's draft to verify.
    model_size: int32[num_requests], of model_sizes the one that is chosen, 0 for none; num_model is
        less where so few steps have not so many nodes.
    model_expected: float32[num_requests], accepted tokens expected of these; 0 for pinned requests.
    num_steps: steps of the model drafter, where any request drafts with it.
    width: nodes that the step verifies per request, root included.
    most_cache: the largest of num_cache.
    """

    num_cache: Int32
    num_model: Int32
    model_size: Int32
    model_expected: Float32
    num_steps: int
    width: int
    most_cache: int


class StepAllocator:
    """start for a new request, then allocate before each step and observe after it. Requests are
    known by slots: small numbers. Equal calls give equal results. Not thread-safe.

    costs: what steps cost on the machine.
    widths: nodes per request that a step can verify, root included.
    base_width: the widest of them for steps of more than MOST_WIDE_REQUESTS; None: all are for any
        number of requests.
    model_sizes: nodes of the model drafter's draft, root not included.
    num_steps: numbers of steps that the model drafter may run.
    most_nodes: nodes that its draft can have, root not included, by num_steps; None: any number.
    merges: a request may verify both drafts in one tree.
    draft_extend: when the model drafter's KV cache is brought up to date.
    own_pace: how far what tokens and time are worth follows what the step itself brings and takes,
        from 0, where the pace of the latest steps holds, to 1.

    Raises ValueError where they do not fit each other.
    """

    def __init__(
        self,
        costs: StepCosts,
        *,
        widths: Sequence[int],
        model_sizes: Sequence[int],
        num_steps: Sequence[int],
        base_width: int | None = None,
        most_nodes: Sequence[int] | None = None,
        merges: bool = True,
        draft_extend: DraftExtend = DraftExtend.EVERY_STEP,
        own_pace: float = OWN_PACE,
    ) -> None:
        for name, values in (
            ("widths", widths),
            ("model_sizes", model_sizes),
            ("num_steps", num_steps),
        ):
            if not values or values[0] < 1 or any(np.diff(values) < 1):
                raise ValueError(f"{name} must rise from 1 or more, got {tuple(values)}")
        if base_width is None:
            base_width = widths[-1]
        if base_width not in widths:
            raise ValueError(f"base_width {base_width} must be one of widths, {tuple(widths)}")
        if model_sizes[-1] >= base_width:
            raise ValueError(
                f"a verification of {base_width} nodes has no room for a root and "
                f"{model_sizes[-1]} nodes of the model drafter"
            )
        self._costs = costs
        self._widths = VerifyWidths(tuple(widths), base_width)
        self._model_sizes = np.array(model_sizes, np.int32)
        self._num_steps = np.array(num_steps, np.int32)
        if most_nodes is None:
            most_nodes = [model_sizes[-1]] * len(num_steps)
        if len(most_nodes) != len(num_steps) or min(most_nodes) < 1:
            raise ValueError("most_nodes must have one number for each of num_steps, 1 or more")
        self._most_nodes = np.array(most_nodes, np.int32)
        self._draft_extend = draft_extend
        self._native = _StepAllocator.of(self._model_sizes, own_pace, merges, _LOOK_AFTER)
        self._runs_ahead = False
        self._of_batch: dict[int, BatchCosts] = {}

    @property
    def model_sizes(self) -> Sequence[int]:
        """Nodes of the model drafter's draft, root not included, rising."""
        return tuple(self._model_sizes.tolist())

    @property
    def num_steps(self) -> Sequence[int]:
        """Numbers of steps that the model drafter may run, rising."""
        return tuple(self._num_steps.tolist())

    @property
    def costs(self) -> StepCosts:
        """The cost table in force."""
        return self._costs

    def widest(self, num_requests: int) -> int:
        """Nodes per request that a step of so many requests can verify, root included."""
        return self._widths.widest_of(num_requests)

    def use_widths(self, widths: Sequence[int]) -> None:
        """Some of its widths are all there are: the base width and others."""
        assert {self._widths.base} <= set(widths) <= set(self._widths.values)
        self._widths = self._widths.only(widths)
        self._of_batch.clear()

    def use_num_steps(self, num_steps: Sequence[int]) -> None:
        """The model drafter has only some of its numbers of steps: the largest and others."""
        assert num_steps[-1] == self._num_steps[-1]
        places = np.searchsorted(self._num_steps, num_steps)
        assert self._num_steps[places].tolist() == list(num_steps)
        self._num_steps, self._most_nodes = self._num_steps[places], self._most_nodes[places]
        self._of_batch.clear()

    def run_ahead(self) -> None:
        """From now on a step without drafts behind another such need not wait for its tokens; needs
        a width of 1. Else every step takes the wait of the table."""
        assert self._widths.values[0] == 1, "no step is without drafts"
        self._runs_ahead = True
        self._of_batch.clear()

    def use_costs(self, costs: StepCosts) -> None:
        """Allocates by another table from the next step on."""
        self._costs = costs
        self._of_batch.clear()

    def start(self, slot: int) -> None:
        """A new request has this slot."""
        self._native.start(slot)

    def allocate(
        self,
        slots: Int32,
        odds: DraftOdds,
        is_pinned: npt.NDArray[np.bool_] | None = None,
        *,
        num_context: int = 0,
        next_waits: bool = False,
    ) -> Allocation:
        """The drafts that make most progress in their time.

        slots: int32[num_requests]; row i of the odds belongs to slots[i].
        is_pinned: bool[num_requests], requests that verify the model drafter's largest draft alone,
            whatever it brings; None: none does.
        num_context: tokens in the KV caches of all these requests.
        next_waits: the next step waits for the tokens of this one even if this one has no drafts.
        """
        num = len(slots)
        num_cache, num_model, model_size = (np.empty(num, np.int32) for _ in range(3))
        model_expected = np.empty(num, np.float32)
        width, steps, most_cache = self._native.allocate(
            slots,
            is_pinned,
            *_arrays(odds),
            self._of_batch.get(num) or self._costs_of(num),
            self._costs.context_ms(num_context),
            next_waits,
            num_cache,
            num_model,
            model_size,
            model_expected,
        )
        return Allocation(
            num_cache,
            num_model,
            model_size,
            model_expected,
            int(self._num_steps[steps]),
            self._widths.values[width],
            most_cache,
        )

    def wants_drafts(
        self,
        slots: Int32,
        odds: DraftOdds,
        is_pinned: npt.NDArray[np.bool_] | None = None,
        *,
        num_context: int = 0,
    ) -> bool:
        """Takes in a step that was launched without drafts before these odds of it were known, as
        allocate does one that it chooses. Returns whether drafts would have been better, or are to
        be looked at, so that the next step should be allocated for.
        """
        num = len(slots)
        costs = self._of_batch.get(num) or self._costs_of(num)
        context_ms = self._costs.context_ms(num_context)
        return self._native.wants_drafts(slots, is_pinned, *_arrays(odds), costs, context_ms)

    def observe(self, slots: Int32, num_tokens: Int32) -> None:
        """Takes in how many tokens the step committed for each request: int32[num_requests]."""
        self._native.see_tokens(slots, num_tokens)

    def _costs_of(self, num_requests: int) -> BatchCosts:
        """The costs of a batch of so many requests: of a step by its width, of a draft by its
        number of steps and of drafting requests."""
        widths, drafting = self._widths.of_step(num_requests), range(num_requests + 1)
        step_ms = self._costs.verify_ms(num_requests, widths)
        draft_ms = np.array([self._costs.draft_ms(drafting, steps) for steps in self.num_steps])
        if self._draft_extend is DraftExtend.WHEN_DRAFTING:
            draft_ms = draft_ms + self._costs.catch_up_ms(drafting, _TYPICAL_MISSING)
        else:
            # Also where long runs of steps without drafts do not have it: most runs are short.
            step_ms = step_ms + self._costs.draft_extend_ms(num_requests, widths)
        wait_ms = self._costs.wait_ms(num_requests)
        if not self._runs_ahead:
            step_ms, wait_ms = step_ms + wait_ms, 0.0
        if len(self._of_batch) == _MOST_BATCHES:
            self._of_batch.clear()
        costs = self._of_batch[num_requests] = BatchCosts.of(
            np.array(widths, np.int32),
            step_ms,
            self._num_steps,
            self._most_nodes,
            draft_ms,
            wait_ms,
        )
        return costs


def _arrays(odds: DraftOdds) -> tuple[Float32, Int32, Int32, Float32, Float32]:
    return odds.probs, odds.depths, odds.num_nodes, odds.reaches, odds.reaches_if_right
