"""Recorded generations, replayed through the drafter with the recording as the target model.

Under greedy decoding the target accepts of a cache draft exactly what agrees with the recording
(paper, section 3.3), so no model is needed. The model drafter is not run either: what its drafts
bring is given.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff.features import MAX_DRAFT_LEN, POSITION_FEATURES
from sglang_hvd.payoff.training_rows import TrainingRows
from sglang_hvd.replay.acceptance import num_agreeing, outcome_of
from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import DraftPlan, VerifyOutcome


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

    num_tokens: of which it is known whether they are right: where the text was cut, those before
        its end; else all.
    accepted_len: tokens of it that the target would accept. Tokens behind the end of a text that
        was not cut are not accepted: they bring nothing.
    is_verified: whether it was the draft that was verified.
    is_worth_known: whether the text shows if six of its tokens, which make a draft worth its
        verification, are right: False where it was cut before them.
    features: float32[num_features]. positions: float32[num_tokens, num_position_features].
    """

    num_tokens: int
    accepted_len: int
    is_verified: bool
    is_worth_known: bool
    features: npt.NDArray[np.float32]
    positions: npt.NDArray[np.float32]


def replay(
    trace: Trace,
    drafter: HybridDrafter,
    *,
    num_model_accepted: int | Mapping[int, npt.NDArray[np.int32]],
    max_cache_draft_tokens: int | None = None,
    keep: bool = True,
    namespace: str = "",
) -> list[ReplayedCycle]:
    """Generates a trace's output again, cycle by cycle.

    num_model_accepted: accepted tokens of each cycle that verifies the model drafter's draft, if
        it has as many steps; or, by size of that draft in nodes, int32[num_output], those of the
        cycle that starts at each token of the output. 0 makes every position of the output the
        start of a cycle, if no cache draft is verified.
    max_cache_draft_tokens: longest cache draft; None: the drafter's own limit.
    keep: the output enters the drafter's shared cache.
    namespace: of that cache.
    """
    output_ids = trace.output_ids
    if not len(output_ids):
        return []
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
        of_model = num_model_accepted
        if isinstance(of_model, Mapping):
            of_model = int(of_model[plan.num_model_nodes][position]) if plan.num_model_nodes else 0
        outcome = outcome_of(plan, rest, accepted_len, min(of_model, plan.num_model_steps))
        drafter.commit([trace], [outcome])
        draft = None
        if proposals.features is not None and draft_len > 0:
            known_len = min(draft_len, len(rest)) if trace.is_cut else draft_len
            draft = ReplayedDraft(
                known_len,
                accepted_len,
                plan.cache_draft is not None,
                known_len >= min(draft_len, WORTH_LEN),
                proposals.features.features[0].copy(),
                proposals.features.positions[0, :, :known_len].T.copy(),
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
        is_worth_known=np.array([draft.is_worth_known for draft in drafts]),
    )
