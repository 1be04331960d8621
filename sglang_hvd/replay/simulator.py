"""Replays recorded generations through the drafter, with the recording as the target model.

Under greedy decoding the target accepts of a cache draft exactly what agrees with the recording
(paper, section 3.3), so no model is needed. The model drafter is not run either: it is taken to
have a fixed number of tokens accepted in each of its cycles.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.replay.traces import Trace
from sglang_hvd.types import CacheDraft, DraftPlan, DraftSource, TokenIds, VerifyOutcome


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedCycle:
    """One cycle of a replayed generation.

    features: float32[num_features] of the cache draft; None without a draft or in a drafter
        without token classes.
    accepted_len: tokens of the cache draft that the target would accept, whether or not it is
        the draft that was verified; None without a draft.
    """

    plan: DraftPlan
    outcome: VerifyOutcome
    features: npt.NDArray[np.float32] | None
    accepted_len: int | None


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    """What a policy made of some cycles (paper, appendices A and G).

    num_tokens: generated in the cycles; the token that prefill generates is not among them.
    mean_accepted_len: over the cycles that verified a draft, bonus token not counted.
    cache_share: share of the cycles that verified a cache draft.
    """

    num_cycles: int
    num_tokens: int
    mean_accepted_len: float
    cache_share: float

    @property
    def cycles_per_1k_tokens(self) -> float:
        return 1000 * self.num_cycles / self.num_tokens


def replay(
    trace: Trace,
    drafter: HybridDrafter,
    *,
    num_model_accepted: int,
    max_cache_draft_tokens: int | None = None,
    keep: bool = True,
) -> list[ReplayedCycle]:
    """Generates a trace's output again, cycle by cycle.

    num_model_accepted: accepted tokens of each cycle that verifies the model drafter's draft.
        0 makes every position of the output the start of a cycle, if no cache draft is verified.
    max_cache_draft_tokens: longest cache draft; None: the drafter's own limit.
    keep: the output enters the drafter's shared cache.
    """
    output_ids = trace.output_ids
    if not len(output_ids):
        return []
    cycles: list[ReplayedCycle] = []
    drafter.start(trace, trace.prompt_ids)
    drafter.extend(trace, output_ids[:1])
    position = 1
    while position < len(output_ids):
        proposals = drafter.propose([trace], max_cache_draft_tokens)
        [plan] = drafter.allocate([trace], proposals)
        [draft] = proposals.drafts
        rest = output_ids[position:]
        accepted_len = None if draft is None else _num_agreeing(draft, rest)
        outcome = _verify(plan, rest, accepted_len, num_model_accepted)
        drafter.commit([trace], [outcome])
        features = None if proposals.features is None or draft is None else proposals.features[0]
        cycles.append(ReplayedCycle(plan, outcome, features, accepted_len))
        position += len(outcome.token_ids)
    drafter.finish(trace, output_ids=None, keep=keep)
    return cycles


def training_rows(
    cycles: Iterable[ReplayedCycle],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """features float32[num_drafts, num_features] and accepted lengths int32[num_drafts] of the
    cycles that had a cache draft."""
    rows = [c for c in cycles if c.features is not None and c.accepted_len is not None]
    if not rows:
        raise ValueError("no cycle had a cache draft with features")
    return (
        np.array([row.features for row in rows], dtype=np.float32),
        np.array([row.accepted_len for row in rows], dtype=np.int32),
    )


def summarize(cycles: Iterable[ReplayedCycle]) -> ReplaySummary:
    """Counts over cycles. Raises ValueError without any."""
    num_cycles = num_tokens = num_cache = num_drafted = num_accepted = 0
    for cycle in cycles:
        num_cycles += 1
        num_tokens += len(cycle.outcome.token_ids)
        num_cache += cycle.plan.source is DraftSource.CACHE
        num_drafted += cycle.plan.source is not DraftSource.PLAIN
        num_accepted += cycle.outcome.num_accepted_drafts
    if not num_cycles:
        raise ValueError("no cycles to summarize")
    return ReplaySummary(
        num_cycles=num_cycles,
        num_tokens=num_tokens,
        mean_accepted_len=num_accepted / num_drafted if num_drafted else 0.0,
        cache_share=num_cache / num_cycles,
    )


def _num_agreeing(draft: CacheDraft, rest: TokenIds) -> int:
    """The label: leading draft tokens that agree with the recorded continuation."""
    length = min(draft.num_tokens, len(rest))
    agrees = draft.token_ids[:length] == rest[:length]
    return length if agrees.all() else int(agrees.argmin())


def _verify(
    plan: DraftPlan, rest: TokenIds, accepted_len: int | None, num_model_accepted: int
) -> VerifyOutcome:
    match plan.source:
        case DraftSource.CACHE:
            assert accepted_len is not None, "a cache draft was planned that was not proposed"
            num_accepted = accepted_len
        case DraftSource.MODEL:
            num_accepted = min(num_model_accepted, len(rest))
        case DraftSource.PLAIN:
            num_accepted = 0
    return VerifyOutcome(rest[: num_accepted + 1], num_accepted)
