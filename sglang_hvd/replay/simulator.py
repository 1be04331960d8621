"""Replays recorded generations through the drafter, with the recording as the target model.

Under greedy decoding the target accepts of a cache draft exactly what agrees with the recording
(paper, section 3.3), so no model is needed. The model drafter is not run either: what its drafts
bring is given.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff.features import MAX_DRAFT_LEN, POSITION_FEATURES
from sglang_hvd.payoff.rows import TrainingRows
from sglang_hvd.replay.plan_costs import PlanCosts
from sglang_hvd.suffix_cache.token_ids import num_agreeing, right_branch
from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import DraftPlan, DraftSource, TokenIds, VerifyOutcome


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedCycle:
    """One cycle of a replayed generation.

    draft: the cache draft's label and features; None without a draft or in a drafter without
        token classes.
    """

    plan: DraftPlan
    outcome: VerifyOutcome
    draft: "ReplayedDraft | None"


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedDraft:
    """A cache draft, verified or not.

    accepted_len: tokens of it that the target would accept. Where the text ends inside the draft
        none of the rest is: it brings nothing.
    is_verified: whether it was the draft that was verified.
    features: float32[num_features]. positions: float32[num_tokens, num_position_features].
    """

    num_tokens: int
    accepted_len: int
    is_verified: bool
    features: npt.NDArray[np.float32]
    positions: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CycleTotals:
    """Counts over cycles.

    num_tokens: generated in the cycles; the token that prefill generates is not among them.
    num_drafted, num_cache, num_both: cycles that verified a draft, those that verified the cache's
        alone, and those that verified both.
    num_accepted: accepted draft tokens.
    num_steps: of the engine, in which they ran.
    ms: the time of these, 0 where no costs are known.
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
    def num_model(self) -> int:
        """Cycles that verified the model drafter's draft, alone or with the cache's."""
        return self.num_drafted - self.num_cache


def replay(
    trace: Trace,
    drafter: HybridDrafter,
    *,
    num_model_accepted: int | npt.NDArray[np.int32],
    max_cache_draft_tokens: int | None = None,
    keep: bool = True,
    namespace: str = "",
) -> list[ReplayedCycle]:
    """Generates a trace's output again, cycle by cycle.

    num_model_accepted: accepted tokens of each cycle that verifies the model drafter's draft; an
        array, int32[num_output], has those of the cycle that starts at each token of the output.
        0 makes every position of the output the start of a cycle, if no cache draft is verified.
    max_cache_draft_tokens: longest cache draft; None: the drafter's own limit.
    keep: the output enters the drafter's shared cache.
    namespace: of that cache.
    """
    output_ids = trace.output_ids
    if not len(output_ids):
        return []
    of_model = np.broadcast_to(np.asarray(num_model_accepted, np.int32), len(output_ids)).tolist()
    cycles: list[ReplayedCycle] = []
    drafter.start(trace, trace.prompt_ids, namespace=namespace)
    drafter.extend(trace, output_ids[:1])
    position = 1
    while position < len(output_ids):
        proposals = drafter.propose([trace], max_cache_draft_tokens)
        [plan] = drafter.allocate([trace], proposals)
        rest = output_ids[position:]
        draft_len = int(proposals.drafts.num_nodes[0])
        accepted_len = num_agreeing(proposals.drafts.token_ids[0, :draft_len], rest)
        outcome = verify(plan, rest, accepted_len, of_model[position])
        drafter.commit([trace], [outcome])
        draft = None
        if proposals.features is not None and draft_len > 0:
            draft = ReplayedDraft(
                draft_len,
                accepted_len,
                plan.cache_draft is not None,
                proposals.features.features[0].copy(),
                proposals.features.positions[0, :, :draft_len].T.copy(),
            )
        cycles.append(ReplayedCycle(plan, outcome, draft))
        position += len(outcome.token_ids)
    drafter.finish(trace, output_ids=None, keep=keep)
    return cycles


def training_rows(cycles: Iterable[ReplayedCycle]) -> TrainingRows:
    """The cycles that had a cache draft. Raises ValueError if none had."""
    drafts = [cycle.draft for cycle in cycles if cycle.draft is not None]
    if not drafts:
        raise ValueError("no cycle had a cache draft with features")
    draft_lens = np.array([draft.num_tokens for draft in drafts], np.int32)
    longest = min(int(draft_lens.max()), MAX_DRAFT_LEN)
    positions = np.zeros((len(drafts), longest, len(POSITION_FEATURES)), np.float32)
    for row, draft in zip(positions, drafts, strict=True):
        row[: draft.num_tokens] = draft.positions
    return TrainingRows(
        features=np.array([draft.features for draft in drafts], np.float32),
        positions=positions,
        draft_lens=draft_lens,
        accepted_lens=np.array([draft.accepted_len for draft in drafts], np.int32),
        is_verified=np.array([draft.is_verified for draft in drafts]),
    )


def count_cycles(cycles: Iterable[ReplayedCycle], costs: PlanCosts | None = None) -> CycleTotals:
    """What a policy made of the cycles of one request after the other (paper, appendices A and G).

    costs: for their time; with draft-extend in every cycle.
    """
    return sum(
        (count_step([cycle.plan], [cycle.outcome], costs, [0]) for cycle in cycles), CycleTotals()
    )


def count_step(
    plans: Sequence[DraftPlan],
    outcomes: Sequence[VerifyOutcome],
    costs: PlanCosts | None,
    num_missing: Sequence[int],
) -> CycleTotals:
    """The cycles of one step, a request each.

    num_missing: tokens of each request that the model drafter's KV cache lacks before it.
    """
    sources = [plan.source for plan in plans]
    return CycleTotals(
        num_cycles=len(plans),
        num_tokens=sum(len(outcome.token_ids) for outcome in outcomes),
        num_drafted=len(plans) - sources.count(DraftSource.PLAIN),
        num_cache=sources.count(DraftSource.CACHE),
        num_both=sources.count(DraftSource.BOTH),
        num_accepted=sum(outcome.num_accepted_drafts for outcome in outcomes),
        num_steps=1,
        ms=0.0 if costs is None else costs.ms(plans, num_missing),
    )


def verify(
    plan: DraftPlan, rest: TokenIds, num_cache_accepted: int, num_model_accepted: int
) -> VerifyOutcome:
    """What the target makes of a cycle.

    rest: of the recording, from the cycle's start.
    num_cache_accepted, num_model_accepted: tokens of the cache's chain and of the model drafter's
        draft that agree with the recording.
    """
    of_cache = of_model = 0
    if plan.cache_draft is not None:
        of_cache = min(num_cache_accepted, plan.cache_draft.num_tokens)
        if plan.cache_draft.parents is not None:
            of_cache = len(right_branch(plan.cache_draft.token_ids, plan.cache_draft.parents, rest))
    if plan.source in (DraftSource.MODEL, DraftSource.BOTH):
        of_model = min(num_model_accepted, len(rest))
    num_accepted = max(of_cache, of_model)
    return VerifyOutcome(
        rest[: num_accepted + 1],
        num_accepted,
        of_model if plan.source is DraftSource.BOTH else None,
    )
