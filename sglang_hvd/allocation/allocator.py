"""Policy `allocate`: chooses the drafts of a step by what they gain and what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd._native import BatchCosts
from sglang_hvd._native import StepAllocator as _StepAllocator
from sglang_hvd.allocation.draft_extend import DraftExtend
from sglang_hvd.allocation.model_drafts import DrafterChoices, require_rising
from sglang_hvd.allocation.widths import VerifyWidths
from sglang_hvd.costs import StepCosts

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

# Exploration: after so many steps without any draft of a kind, one request verifies one, so that
# its prediction cannot go stale. Requests take turns.
_LOOK_AFTER = 256

# Tokens that are typically missing from the model drafter's KV cache for a request that catches up
# when it drafts: those of about two cycles.
_TYPICAL_MISSING = 8

# Batch sizes whose costs are kept: each takes memory linear in it.
_MAX_BATCHES = 256


@dataclass(frozen=True, slots=True, eq=False)
class PredictedDrafts:
    """The predicted acceptance of each request's drafts. Row i belongs to request i.

    probs: float32[num_requests, max_nodes], probability that a node of the host's draft is
        accepted, the most probable first; each node stands after its parent.
    depths: int32, same shape, from 1.
    num_nodes: int32[num_requests], 0 without such a draft.
    model_probs: float32[num_requests, num_sizes, num_steps], probability that at least 1, 2, ...
        tokens of a drafter's draft are accepted, by its size; the sizes of all drafters, in order.
    model_probs_if_right: same shape; the same probability if the host's draft is right up to that
        token.
    """

    probs: Float32
    depths: Int32
    num_nodes: Int32
    model_probs: Float32
    model_probs_if_right: Float32


@dataclass(frozen=True, slots=True, eq=False)
class RowLimits:
    """What requests ask of their drafts. Row i belongs to request i.

    are_fixed: bool[num_requests]; these requests verify the drafts given here, whatever they gain.
    num_host: int32[num_requests], first nodes of the fixed host drafts.
    num_model: int32[num_requests], nodes of the model drafter's fixed drafts.
    max_nodes: int32[num_requests]; of a request whose drafts are not fixed, all drafts together.
    """

    are_fixed: npt.NDArray[np.bool_]
    num_host: Int32
    num_model: Int32
    max_nodes: Int32


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """The drafts of one step.

    num_host: int32[num_requests], first nodes of each host draft to verify.
    num_model: int32[num_requests], nodes of the drafter's draft to verify.
    model_size: int32[num_requests], the size that was chosen for it, 0 for none; num_model is
        smaller if the chosen steps give fewer nodes.
    model_predicted: float32[num_requests], predicted accepted tokens of these; 0 for fixed drafts.
    drafter: place of the drafter that drafts, if any request drafts.
    num_steps: steps of that drafter.
    width: nodes that the step verifies per request, root included.
    max_host: the largest of num_host.
    """

    num_host: Int32
    num_model: Int32
    model_size: Int32
    model_predicted: Float32
    drafter: int
    num_steps: int
    width: int
    max_host: int


class StepAllocator:
    """start for a new request, then allocate before each step and observe after it. Requests are
    known by slots: small numbers. Equal calls give equal results. Not thread-safe.

    costs: the times of steps on the machine.
    widths: nodes per request that a step can verify, root included.
    base_width: the widest of them for steps of more than MAX_WIDE_REQUESTS; None: every width is
        for any number of requests.
    drafters: the choices of each drafter on the device; the first is the model drafter.
    merges: a request may verify drafts of the host and of a drafter in one tree.
    draft_extend: decides when the model drafter's KV cache is brought up to date.
    runs_ahead: a step without drafts that follows another such step does not wait for its tokens;
        needs a width of 1. Otherwise every step takes the wait of the table.

    Raises ValueError if they do not fit each other.
    """

    def __init__(
        self,
        costs: StepCosts,
        *,
        widths: Sequence[int],
        drafters: Sequence[DrafterChoices],
        base_width: int | None = None,
        merges: bool = True,
        draft_extend: DraftExtend = DraftExtend.EVERY_STEP,
        runs_ahead: bool = False,
    ) -> None:
        require_rising("widths", widths)
        if base_width is None:
            base_width = widths[-1]
        if base_width not in widths:
            raise ValueError(f"base_width {base_width} must be one of widths, {tuple(widths)}")
        largest = max(drafter.sizes[-1] for drafter in drafters)
        if largest >= base_width:
            raise ValueError(
                f"a verification of {base_width} nodes has no room for a root and {largest} nodes "
                "of the model drafter"
            )
        if runs_ahead and widths[0] != 1:
            raise ValueError(f"runs_ahead needs a width of 1, got {tuple(widths)}")
        self._costs = costs
        self._widths = VerifyWidths(tuple(widths), base_width)
        self._drafters = tuple(drafters)
        self._draft_extend = draft_extend
        sizes = [size for drafter in drafters for size in drafter.sizes]
        of_sizes = [place for place, drafter in enumerate(drafters) for _ in drafter.sizes]
        self.native = _StepAllocator.of(
            np.array(sizes, np.int32), np.array(of_sizes, np.int32), merges, _LOOK_AFTER
        )
        self._runs_ahead = runs_ahead
        self._of_batch: dict[int, BatchCosts] = {}

    @property
    def drafters(self) -> Sequence[DrafterChoices]:
        """The choices of each drafter on the device."""
        return self._drafters

    @property
    def costs(self) -> StepCosts:
        """The cost table in force."""
        return self._costs

    def widest(self, num_requests: int) -> int:
        """Nodes per request that a step of so many requests can verify, root included."""
        return self._widths.widest_of(num_requests)

    def use_costs(self, costs: StepCosts) -> None:
        """Allocates by another table from the next step on."""
        self._costs = costs
        self._of_batch.clear()

    def start(self, slot: int) -> None:
        """A new request has this slot."""
        self.native.start(slot)

    def allocate(
        self,
        slots: Int32,
        predicted: PredictedDrafts,
        limits: RowLimits | None = None,
        *,
        num_context: int = 0,
        next_waits: bool = False,
    ) -> Allocation:
        """The drafts that make most progress in their time.

        slots: int32[num_requests]; row i of the prediction belongs to slots[i].
        limits: None: no request asks for any.
        num_context: tokens in the KV caches of all these requests.
        next_waits: the next step waits for the tokens of this one even if this one has no drafts.
        """
        num = len(slots)
        num_host, num_model, model_size = (np.empty(num, np.int32) for _ in range(3))
        model_predicted = np.empty(num, np.float32)
        width, place, max_host = self.native.allocate(
            slots,
            limits,
            predicted,
            self.costs_of(num),
            self._costs.context_ms(num_context),
            next_waits,
            num_host,
            num_model,
            model_size,
            model_predicted,
        )
        drafter = 0
        while place >= len(self._drafters[drafter].num_steps):
            place -= len(self._drafters[drafter].num_steps)
            drafter += 1
        return Allocation(
            num_host,
            num_model,
            model_size,
            model_predicted,
            drafter,
            self._drafters[drafter].num_steps[place],
            self._widths.values[width],
            max_host,
        )

    def wants_drafts(
        self,
        slots: Int32,
        predicted: PredictedDrafts,
        limits: RowLimits | None = None,
        *,
        num_context: int = 0,
    ) -> bool:
        """Replaces allocate for a step that was launched without drafts, before its prediction was
        known. Returns whether drafts would have been better, or are to be explored. If so, the next
        step should be allocated.
        """
        num = len(slots)
        context_ms = self._costs.context_ms(num_context)
        return self.native.wants_drafts(slots, limits, predicted, self.costs_of(num), context_ms)

    def observe(self, slots: Int32, num_tokens: Int32) -> None:
        """Learns how many tokens the step committed for each request: int32[num_requests]."""
        self.native.see_tokens(slots, num_tokens)

    def costs_of(self, num_requests: int) -> BatchCosts:
        """The costs of a batch of so many requests: of a step by its width, of a draft by its round
        and the number of drafting requests."""
        if (found := self._of_batch.get(num_requests)) is not None:
            return found
        widths, drafting = self._widths.of_step(num_requests), range(num_requests + 1)
        step_ms = self._costs.verify_ms(num_requests, widths)
        rounds = [
            (place, steps, max_nodes, drafter.draft_ms(self._costs, drafting, steps))
            for place, drafter in enumerate(self._drafters)
            for steps, max_nodes in zip(drafter.num_steps, drafter.node_limits, strict=True)
        ]
        places, num_steps, max_nodes = (
            np.array([each[column] for each in rounds], np.int32) for column in range(3)
        )
        draft_ms = np.array([of_round for *_, of_round in rounds])
        if self._draft_extend is DraftExtend.WHEN_DRAFTING:
            draft_ms[places == 0] += self._costs.catch_up_ms(drafting, _TYPICAL_MISSING)
        else:
            # Long runs of steps without drafts skip draft-extend, but most runs are short.
            step_ms = step_ms + self._costs.draft_extend_ms(num_requests, widths)
        wait_ms = self._costs.wait_ms(num_requests)
        if not self._runs_ahead:
            step_ms, wait_ms = step_ms + wait_ms, 0.0
        if len(self._of_batch) == _MAX_BATCHES:
            self._of_batch.clear()
        costs = self._of_batch[num_requests] = BatchCosts.of(
            np.array(widths, np.int32), step_ms, places, num_steps, max_nodes, draft_ms, wait_ms
        )
        return costs
