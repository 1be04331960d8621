"""Servers whose table of costs is wrong, so that `allocate` has to correct it by its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_hvd.allocation import DraftExtend, StepAllocator
from sglang_hvd.costs import LearnedCosts, StepCosts
from sglang_hvd.replay.core.single_cycles import DraftPlan
from sglang_hvd.replay.core.totals import PlanCosts

# As a server does.
_FIRST_TABLES, _TABLE_EVERY = (2, 4, 8, 16, 32), 64

# What times of the same step differ by: a standard deviation of their logarithm.
_NOISE = 0.05

_COMPILE_MS = 100.0


def _same(costs: StepCosts) -> StepCosts:
    return costs


@dataclass(frozen=True)
class Disturbance:
    """How a server differs from its table.

    timed: the table that the server starts from.
    true: the table that its steps follow.
    min_draft_ms: a draft takes at least so long, since the device waits for the host.
    compiles: the first step of each shape waits for kernels to be compiled. The learner sees that
        time, which does not count in the speed.
    follows_documents: the server has served another recording before, with other contexts.
    """

    timed: Callable[[StepCosts], StepCosts] = _same
    true: Callable[[StepCosts], StepCosts] = _same
    min_draft_ms: float = 0.0
    compiles: bool = False
    follows_documents: bool = False


def _slower(costs: StepCosts) -> StepCosts:
    """Timed on a machine four times as fast."""
    fields = {
        name: (np.array(value) / 4).tolist()
        for name in ("verify", "draft_round", "draft_once", "draft_extend")
        if (value := getattr(costs, name)) is not None
    }
    return costs.model_copy(update=fields)


def _nodes(factor: float) -> Callable[[StepCosts], StepCosts]:
    """Nodes in addition to the roots were timed at so many times their costs."""

    def timed(costs: StepCosts) -> StepCosts:
        verify = np.array(costs.verify)
        return costs.model_copy(
            update={"verify": (verify[:, :1] + factor * (verify - verify[:, :1])).tolist()}
        )

    return timed


def _one_width(costs: StepCosts) -> StepCosts:
    """The machine was busy while it timed the steps of 8 nodes and more."""
    verify = np.array(costs.verify) * np.where(np.array(costs.widths) >= 8, 1.6, 1.0)
    return costs.model_copy(update={"verify": verify.tolist()})


def _with_contexts(costs: StepCosts) -> StepCosts:
    """1,000 tokens of context take a fiftieth of a plain step of one request."""
    return costs.model_copy(update={"context": costs.verify[0][0] / 50})


def _assumed(costs: StepCosts) -> StepCosts:
    """A server that is not timed before it serves."""
    return StepCosts.assumed(costs.widths)


DISTURBANCES = {
    "right": Disturbance(),
    "four times slower": Disturbance(timed=_slower),
    "nodes halved": Disturbance(timed=_nodes(0.5)),
    "nodes doubled": Disturbance(timed=_nodes(2.0)),
    "wide steps disturbed": Disturbance(timed=_one_width),
    "no profile": Disturbance(timed=_assumed),
    "slow first steps": Disturbance(compiles=True),
    "drafts wait": Disturbance(min_draft_ms=2.0),
    "contexts": Disturbance(true=_with_contexts),
    "contexts change": Disturbance(true=_with_contexts, follows_documents=True),
}


class LearnedPlanCosts(PlanCosts):
    """The time of steps, from which the allocator learns what they cost."""

    def __init__(
        self,
        costs: StepCosts,
        widths: Sequence[int],
        draft_extend: DraftExtend,
        *,
        disturbance: Disturbance,
        allocator: StepAllocator,
        runs_ahead: bool,
        seed: int,
    ) -> None:
        super().__init__(disturbance.true(costs), widths, draft_extend)
        timed = disturbance.timed(costs).model_copy(update={"wait": None})
        allocator.use_costs(timed)
        self._has_wait = costs.wait is not None
        self._allocator, self._disturbance = allocator, disturbance
        self._learned = LearnedCosts(timed, runs_ahead=runs_ahead)
        self._noise = np.random.default_rng(seed)
        self._compiled: set[tuple[str, int, int]] = set()
        self._num_steps = 0

    def ms(
        self,
        plans: Sequence[DraftPlan],
        num_missing: Sequence[int],
        num_plain: int,
        *,
        num_context: int = 0,
        is_ahead: bool = False,
    ) -> float:
        if self._has_wait:
            rest = 0.0 if is_ahead else self._seen("rest", len(plans), 0, self.wait_ms(len(plans)))
            self._learned.observe_rest(len(plans), rest, is_before_ahead=is_ahead)
        ms = super().ms(plans, num_missing, num_plain, num_context=num_context, is_ahead=is_ahead)
        self._num_steps += 1
        if self._num_steps % _TABLE_EVERY == 0 or self._num_steps in _FIRST_TABLES:
            self._allocator.use_costs(self._learned.table())
        return ms

    def catch_up_ms(self, num_requests: int, num_tokens: int) -> float:
        ms = super().catch_up_ms(num_requests, num_tokens)
        if self._draft_extend is DraftExtend.WHEN_DRAFTING:
            seen = self._seen("extend", num_requests, num_tokens, ms)
            self._learned.observe_extend(num_requests, num_tokens, seen)
        return ms

    def draft_ms(self, num_requests: int, num_steps: int) -> float:
        ms = max(super().draft_ms(num_requests, num_steps), self._disturbance.min_draft_ms)
        seen = self._seen("draft", num_requests, num_steps, ms)
        self._learned.observe_draft(num_requests, num_steps, seen)
        return ms

    def verify_ms(self, num_requests: int, width: int, num_context: int) -> float:
        ms = super().verify_ms(num_requests, width, num_context)
        seen = self._seen("verify", num_requests, width, ms)
        self._learned.observe_verify(num_requests, width, seen, num_context=num_context)
        return ms

    def draft_extend_ms(self, num_requests: int, width: int) -> float:
        ms = super().draft_extend_ms(num_requests, width)
        seen = self._seen("extend", num_requests, width, ms)
        self._learned.observe_extend(num_requests, width, seen)
        return ms

    def _seen(self, part: str, num_requests: int, size: int, ms: float) -> float:
        seen = ms * float(np.exp(_NOISE * self._noise.standard_normal()))
        shape = (part, num_requests, size)
        if self._disturbance.compiles and shape not in self._compiled:
            self._compiled.add(shape)
            seen += _COMPILE_MS
        return seen
