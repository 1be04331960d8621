"""The values that core and plugin hand to each other."""

from dataclasses import replace

import numpy as np
import pytest

from sglang_hvd import _native
from sglang_hvd.replay.core.single_cycles import (
    CacheDraft,
    VerifyOutcome,
    outcome_batch,
    single_drafts,
    single_plans,
)
from sglang_hvd.types import (
    EVIDENCE,
    EVIDENCE_DEPTH,
    MATCH_COLUMNS,
    SOURCES,
    DraftBatch,
    DraftPlans,
    HostDrafts,
    MatchOrigin,
)


def test_the_native_code_has_the_same_columns() -> None:
    assert [(name, place) for place, name in enumerate(MATCH_COLUMNS)] == _native.MATCH_COLUMNS
    columns: list[str] = []
    for name, place in _native.EVIDENCE_FIELDS:
        assert place == len(columns)
        is_by_token = f"{name}_1" in EVIDENCE
        depths = range(1, EVIDENCE_DEPTH + 1)
        columns += [f"{name}_{depth}" for depth in depths] if is_by_token else [name]
    assert tuple(columns) == EVIDENCE
    assert {origin.name: int(origin) for origin in MatchOrigin} == _native.MATCH_ORIGINS


def test_a_draft_knows_its_length_and_cannot_be_reassigned() -> None:
    draft = CacheDraft(np.array([3, 4], dtype=np.int32), match_len=2, score=1.5, source="request")
    assert draft.num_tokens == 2
    with pytest.raises(AttributeError):
        draft.score = 2.0  # type: ignore[misc]


def chains(*token_ids: list[int], cut: int = 64) -> HostDrafts:
    """Chains that a cache proposed, cut to so many tokens."""
    longest = max(len(tokens) for tokens in token_ids)
    batch = DraftBatch.of_size(len(token_ids) + 1, longest)
    batch.token_ids[:] = 99  # of earlier steps
    for row, tokens in enumerate(token_ids):
        batch.token_ids[row, : len(tokens)] = tokens
        batch.num_nodes[row] = len(tokens)
        batch.matches[row, MATCH_COLUMNS.index("match_len")] = 5 + row
        batch.matches[row, MATCH_COLUMNS.index("num_tokens")] = len(tokens)
        batch.matches[row, MATCH_COLUMNS.index("score")] = 1 - 0.5 ** len(tokens)
        batch.matches[row, MATCH_COLUMNS.index("origin")] = row
    return batch.chains(np.minimum(batch.num_nodes[: len(token_ids)], cut))


def test_the_first_tokens_of_chains_are_drafts_of_their_own() -> None:
    drafts = chains([3, 4, 5], [], [6], cut=2)
    first, nothing, last = single_drafts(drafts)
    assert nothing is None
    assert first is not None
    assert last is not None
    assert (first.token_ids.tolist(), first.match_len, first.source) == ([3, 4], 5, "request")
    assert (last.token_ids.tolist(), last.match_len, last.source) == ([6], 7, "shared")
    assert (first.score, last.score) == (0.875, 0.5)  # of the whole chains
    assert first.parents is None
    for array in (first.token_ids, drafts.token_ids, drafts.parents, drafts.num_nodes):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    # Whoever takes the arrays finds nothing of other steps behind a draft.
    assert drafts.token_ids.tolist() == [[3, 4], [0, 0], [6, 0]]
    assert drafts.parents.tolist() == [[-1, 0]] * 3


def test_drafts_of_several_batches_are_put_together_and_taken_apart() -> None:
    long, short = chains([3, 4, 5], [6]), chains([7])
    both = HostDrafts.concatenate([long, short])
    assert [draft.token_ids.tolist() for draft in single_drafts(both) if draft] == [
        [3, 4, 5],
        [6],
        [7],
    ]
    some = both.select([2, 0])
    assert [draft.token_ids.tolist() for draft in single_drafts(some) if draft] == [[7], [3, 4, 5]]


def test_plans_of_a_batch_are_plans_of_its_requests() -> None:
    plans = DraftPlans(
        drafts=chains([3, 4], [], [6], []),
        num_model_nodes=np.array([7, 3, 0, 0], np.int32),
        model_sizes=np.array([7, 3, 0, 0], np.int32),
        model_steps=np.full(4, 4, np.int32),
        predicted=np.array([1.5, 99, 0.5, 99], np.float32),
        chain_lens=np.array([2, 0, 1, 0], np.int32),
        chain_predicted=np.zeros(4, np.float32),
        model_predicted=np.zeros(4, np.float32),
        host_sources=np.array([1, 0, 1, 0], np.uint8),
        drafter=SOURCES.bit_of("model"),
    )
    both, model, cache, plain = rows = single_plans(plans)
    assert [plan.source for plan in rows] == plans.sources == ["both", "model", "cache", "plain"]
    assert [plan.num_nodes for plan in rows] == plans.num_nodes.tolist() == [9, 3, 1, 0]
    assert [plan.predicted_len for plan in rows] == [1.5, None, 0.5, None]
    assert [plan.num_model_steps for plan in rows] == [4, 4, 0, 0]
    assert both.cache_draft is not None
    assert both.cache_draft.token_ids.tolist() == [3, 4]
    assert model.cache_draft is plain.cache_draft is None
    assert cache.cache_draft is not None
    assert len(plans) == 4
    assert plans.num_model_steps == 4
    parts = [plans.select([0, 3]), plans.select([2])]
    assert DraftPlans.concatenate(parts).sources == ["both", "plain", "cache"]
    assert [plan.predicted_len for plan in single_plans(replace(plans, predicted=None))] == [
        None
    ] * 4


@pytest.mark.parametrize(
    ("token_ids", "num_accepted"),
    [([5], 0), ([5, 6, 7], 2), ([5, 6], 2), ([], 0)],
    ids=["nothing accepted", "bonus token", "ended inside the draft", "nothing committed"],
)
def test_a_cycle_commits_accepted_drafts_and_at_most_one_target_token(
    token_ids: list[int], num_accepted: int
) -> None:
    outcomes = outcome_batch(
        [VerifyOutcome(token_ids, num_accepted), VerifyOutcome([7, 8, 9, 6], 3, 2)]
    )
    assert outcomes.token_ids[0].tolist() == [*token_ids, *[0] * (4 - len(token_ids))]
    assert outcomes.lengths.tolist() == [len(token_ids), 4]
    assert outcomes.num_accepted_drafts.tolist() == [num_accepted, 3]
    assert outcomes.num_model_accepted.tolist() == [-1, 2]
