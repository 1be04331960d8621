"""Counts over replayed cycles and the time of their steps by a table of costs, and the figures that
follow from them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_hvd.allocation import DraftExtend
from sglang_hvd.costs import StepCosts
from sglang_hvd.replay.core.replayed import ReplayedCycle
from sglang_hvd.replay.core.single_cycles import DraftPlan, VerifyOutcome


class PlanCosts:
    """The time of a step by its plans.

    widths: nodes per request that a step can verify, root included. A step has the narrowest width
        that holds what was planned.
    draft_extend: decides when the model drafter's KV cache is brought up to date.
    """

    def __init__(
        self,
        costs: StepCosts,
        widths: Sequence[int],
        draft_extend: DraftExtend,
    ) -> None:
        self._costs = costs
        self._widths = tuple(widths)
        self._draft_extend = draft_extend

    def ms(
        self,
        plans: Sequence[DraftPlan],
        num_missing: Sequence[int],
        num_plain: int,
        *,
        num_context: int = 0,
        is_ahead: bool = False,
    ) -> float:
        """The time in milliseconds.

        num_missing: tokens of each request that are missing from the model drafter's KV cache.
        num_plain: see DraftExtend.
        num_context: tokens in the KV caches of all requests.
        is_ahead: the step did not wait for the tokens of the step before it.
        """
        num, width = len(plans), self._width(plans)
        ms = 0.0 if is_ahead else self.wait_ms(num)
        num_model_nodes = [plan.num_model_nodes for plan in plans]
        catching_up = self._draft_extend.catching_up(num_model_nodes, num_missing, num_plain)
        if catching_up:
            mean = round(sum(num_missing[row] for row in catching_up) / len(catching_up))
            ms += self.catch_up_ms(len(catching_up), mean)
        drafting = [plan.num_model_steps for plan in plans if plan.num_model_nodes]
        if drafting:
            ms += self.draft_ms(len(drafting), max(drafting))
        ms += self.verify_ms(num, width, num_context)
        if self._draft_extend.follows(num_plain):
            ms += self.draft_extend_ms(num, width)
        return ms

    def wait_ms(self, num_requests: int) -> float:
        """Time before a step that waits for the tokens of the last."""
        return self._costs.wait_ms(num_requests)

    def catch_up_ms(self, num_requests: int, num_tokens: int) -> float:
        """Time of a draft-extend of so many requests over so many tokens of each."""
        return float(self._costs.catch_up_ms([num_requests], num_tokens)[0])

    def draft_ms(self, num_requests: int, num_steps: int) -> float:
        """Time of a draft of the model drafter."""
        return float(self._costs.draft_ms([num_requests], num_steps)[0])

    def verify_ms(self, num_requests: int, width: int, num_context: int) -> float:
        """Time of a verification."""
        ms = self._costs.verify_ms(num_requests, [width])[0] + self._costs.context_ms(num_context)
        return float(ms)

    def draft_extend_ms(self, num_requests: int, width: int) -> float:
        """Time of a draft-extend after a verification."""
        return float(self._costs.draft_extend_ms(num_requests, [width])[0])

    def num_plain(self, plans: Sequence[DraftPlan], before: int) -> int:
        """num_plain of a step with these plans; `before` is that of the step before it. See
        DraftExtend."""
        return before + 1 if self._width(plans) == 1 else 0

    def ends_run(self, num_missing: Sequence[int]) -> bool:
        """Whether the next step has to wait for the tokens of this one; see DraftExtend."""
        return self._draft_extend.ends_run(max(num_missing), len(num_missing))

    def missing_after(
        self,
        plans: Sequence[DraftPlan],
        num_missing: Sequence[int],
        num_tokens: Sequence[int],
        num_plain: int,
    ) -> list[int]:
        """Tokens of each request that are missing from the model drafter's KV cache after a step.

        num_missing: missing before the step. num_tokens: committed in the step.
        num_plain: see DraftExtend.
        """
        num_model_nodes = [plan.num_model_nodes for plan in plans]
        return self._draft_extend.missing_after(num_model_nodes, num_missing, num_tokens, num_plain)

    def _width(self, plans: Sequence[DraftPlan]) -> int:
        used = 1 + max(plan.num_nodes for plan in plans)
        return next(width for width in self._widths if width >= used)


@dataclass(frozen=True, slots=True)
class CycleTotals:
    """Counts over cycles.

    num_tokens: tokens generated in the cycles. The token that prefill generates does not count.
    num_drafted: cycles that verified any draft.
    num_cache: cycles that verified a cache draft alone.
    num_both: cycles that verified a cache draft and the model drafter's draft in one tree.
    num_accepted: accepted draft tokens.
    num_steps: engine steps in which the cycles ran.
    ms: time of these steps in milliseconds; 0 if no costs are known.
    """

    num_cycles: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_cache: int = 0
    num_both: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    ms: float = 0.0

    def __add__(self, other: "CycleTotals") -> "CycleTotals":
        return CycleTotals(
            self.num_cycles + other.num_cycles,
            self.num_tokens + other.num_tokens,
            self.num_drafted + other.num_drafted,
            self.num_cache + other.num_cache,
            self.num_both + other.num_both,
            self.num_accepted + other.num_accepted,
            self.num_steps + other.num_steps,
            self.ms + other.ms,
        )

    @property
    def cycles_per_1k_tokens(self) -> float | None:
        """None without tokens."""
        return 1000 * self.num_cycles / self.num_tokens if self.num_tokens else None

    @property
    def mean_accepted_len(self) -> float | None:
        """Accepted draft tokens per cycle, bonus token not counted; None without any cycle."""
        return self.num_accepted / self.num_cycles if self.num_cycles else None

    @property
    def cache_share(self) -> float | None:
        """Share of the cycles that verified a cache draft, alone or in one tree with the model
        drafter's; None without any cycle."""
        return (self.num_cache + self.num_both) / self.num_cycles if self.num_cycles else None

    @property
    def tokens_per_ms(self) -> float | None:
        """None if no costs are known."""
        return self.num_tokens / self.ms if self.ms else None

    @property
    def num_model(self) -> int:
        """Cycles that verified the model drafter's draft, alone or with a cache draft."""
        return self.num_drafted - self.num_cache


def count_cycles(
    cycles: Iterable[ReplayedCycle], costs: PlanCosts | None = None, *, num_context: int = 0
) -> CycleTotals:
    """Totals of the cycles of one request that ran alone (paper, appendices A and G).

    costs: gives the steps' times; None: no times.
    num_context: tokens of the request before its first cycle.
    """
    totals, num_missing, num_plain = CycleTotals(), [0], 0
    for cycle in cycles:
        plans = [cycle.plan]
        if costs is not None:
            num_plain = costs.num_plain(plans, num_plain)
        totals += count_step(
            plans, [cycle.outcome], costs, num_missing, num_plain, num_context=num_context
        )
        num_tokens = [len(cycle.outcome.token_ids)]
        num_context += num_tokens[0]
        if costs is not None:
            num_missing = costs.missing_after(plans, num_missing, num_tokens, num_plain)
    return totals


def count_step(
    plans: Sequence[DraftPlan],
    outcomes: Sequence[VerifyOutcome],
    costs: PlanCosts | None,
    num_missing: Sequence[int],
    num_plain: int,
    *,
    num_context: int = 0,
    is_ahead: bool = False,
) -> CycleTotals:
    """Totals of one step, which runs one cycle of each request.

    num_missing: tokens of each request that are missing from the model drafter's KV cache before
        the step.
    num_plain: see DraftExtend.
    num_context, is_ahead: see PlanCosts.ms.
    """
    sources = [plan.source for plan in plans]
    ms = 0.0
    if costs is not None:
        ms = costs.ms(plans, num_missing, num_plain, num_context=num_context, is_ahead=is_ahead)
    return CycleTotals(
        num_cycles=len(plans),
        num_tokens=sum(len(outcome.token_ids) for outcome in outcomes),
        num_drafted=len(plans) - sources.count("plain"),
        num_cache=sources.count("cache"),
        num_both=sources.count("both"),
        num_accepted=sum(outcome.num_accepted_drafts for outcome in outcomes),
        num_steps=1,
        ms=ms,
    )
