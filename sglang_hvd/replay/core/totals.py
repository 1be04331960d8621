"""Counts over replayed cycles, and the figures that follow from them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_hvd.replay.core.plan_costs import PlanCosts
from sglang_hvd.replay.core.replayed import ReplayedCycle
from sglang_hvd.replay.core.single_cycles import DraftPlan, VerifyOutcome


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
