"""Replays a recorded generation through the drafter, with the recording as the target model.

Under greedy decoding the target accepts exactly those tokens of a cache draft that agree with the
recording (paper, section 3.3), so no model is needed. The model drafter is not run either: the
caller says how many of its tokens are accepted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.drafter.cycle_reports import cycle_of
from sglang_hvd.payoff.features import MAX_DRAFT_LEN, POSITION_FEATURES
from sglang_hvd.replay.core.single_cycles import (
    DraftPlan,
    VerifyOutcome,
    outcome_batch,
    single_plans,
)
from sglang_hvd.replay.core.training_rows import TrainingRows
from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import DraftPlans, TokenIds
from sglang_hvd.view.cycles import Cycle


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedCycle:
    """One cycle of a replayed generation.

    draft: the cache draft's label and features. None without a draft, or if the drafter has no
        token classes.
    """

    plan: DraftPlan
    outcome: VerifyOutcome
    draft: "ReplayedDraft | None"


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedDraft:
    """A cache draft, verified or not.

    num_tokens: tokens that are known to be right or wrong. If the recorded text was cut, tokens
        after its end are unknown; otherwise all are known.
    accepted_len: tokens that the target would accept. It accepts none after the end of a text that
        was not cut.
    is_verified: whether this draft was verified.
    is_worth_known: whether the text is long enough to show if six tokens of the draft are right,
        which makes a draft worth its verification.
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
    reports: list[Cycle] | None = None,
) -> list[ReplayedCycle]:
    """Generates a trace's output again, cycle by cycle.

    num_model_accepted: accepted tokens of the model drafter's draft, at most its number of steps.
        Either one number for all cycles, or, by the draft's size in nodes, int32[num_output] for
        the cycle that starts at each output token. With 0 every output position starts a cycle,
        if no cache draft is verified.
    max_cache_draft_tokens: longest cache draft; None: the drafter's own limit.
    keep: whether the output enters the drafter's shared cache.
    namespace: namespace of the shared cache.
    reports: receives a report of each cycle; None: none is made.
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
        plans = drafter.choose([trace], proposals, explains=[] if reports is None else [0])
        [plan] = single_plans(plans)
        rest = output_ids[position:]
        draft_len = int(proposals.drafts.num_nodes[0])
        accepted_len = num_agreeing(proposals.drafts.token_ids[0, :draft_len], rest)
        of_model = num_model_accepted
        if isinstance(of_model, Mapping):
            of_model = int(of_model[plan.num_model_nodes][position]) if plan.num_model_nodes else 0
        outcome = outcome_of(plan, rest, accepted_len, min(of_model, plan.num_model_steps))
        drafter.commit([trace], outcome_batch([outcome]))
        if reports is not None:
            reports.append(_report(plans, plan, outcome, position))
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


def _report(plans: DraftPlans, plan: DraftPlan, outcome: VerifyOutcome, position: int) -> Cycle:
    """A cycle of a request that is alone. position: place of its first token in the output."""
    committed = np.asarray(outcome.token_ids).tolist()
    if len(committed) == outcome.num_accepted_drafts:
        committed.append(-1)  # the recording ends before the bonus token
    of_model = outcome.num_model_accepted
    return cycle_of(
        plans,
        0,
        committed,
        -1 if of_model is None else of_model,
        source=plan.source,
        at=position,
        width=1 + plan.num_nodes,
        num_requests=1,
        ms=None,
    )


def training_rows(cycles: Iterable[ReplayedCycle]) -> TrainingRows:
    """The rows of the cycles that had a cache draft. Raises ValueError if none had."""
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


def outcome_of(
    plan: DraftPlan, rest: TokenIds, num_cache_accepted: int, num_model_accepted: int
) -> VerifyOutcome:
    """The result of a cycle's verification.

    rest: tokens of the recording from the start of the cycle on.
    num_cache_accepted, num_model_accepted: tokens of the cache's chain and of the model drafter's
        draft that agree with the recording.
    """
    of_cache = of_model = 0
    if plan.cache_draft is not None:
        of_cache = min(num_cache_accepted, plan.cache_draft.num_tokens)
        if plan.cache_draft.parents is not None:
            of_cache = len(right_branch(plan.cache_draft.token_ids, plan.cache_draft.parents, rest))
    if plan.num_model_nodes:
        of_model = min(num_model_accepted, len(rest))
    num_accepted = max(of_cache, of_model)
    return VerifyOutcome(
        rest[: num_accepted + 1],
        num_accepted,
        of_model if plan.cache_draft is not None and plan.num_model_nodes else None,
    )


def num_agreeing(draft_ids: TokenIds, text_ids: TokenIds) -> int:
    """Leading tokens of a draft that agree with the text."""
    length = min(len(draft_ids), len(text_ids))
    agrees = draft_ids[:length] == text_ids[:length]
    return length if agrees.all() else int(agrees.argmin())


def right_branch(token_ids: TokenIds, parents: npt.NDArray[np.int32], text: TokenIds) -> list[int]:
    """The nodes of the branch that agrees with the text, from its first token on."""
    branch: list[int] = []
    for token in text.tolist():
        before = branch[-1] if branch else -1
        following = np.flatnonzero((parents == before) & (token_ids == token))
        if len(following) == 0:
            break
        branch.append(int(following[0]))
    return branch
