"""The values that core and plugin hand to each other."""

import numpy as np
import pytest

from sglang_hvd.types import CacheDraft, VerifyOutcome, VerifyOutcomes


def test_a_draft_knows_its_length_and_cannot_be_reassigned() -> None:
    draft = CacheDraft(np.array([3, 4], dtype=np.int32), match_len=2, score=1.5, source="request")
    assert draft.num_tokens == 2
    with pytest.raises(AttributeError):
        draft.score = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("token_ids", "num_accepted", "num_target_tokens"),
    [([5], 0, 1), ([5, 6, 7], 2, 1), ([5, 6], 2, 0), ([], 0, 0)],
    ids=["nothing accepted", "bonus token", "ended inside the draft", "nothing committed"],
)
def test_a_cycle_commits_accepted_drafts_and_at_most_one_target_token(
    token_ids: list[int], num_accepted: int, num_target_tokens: int
) -> None:
    assert VerifyOutcome(token_ids, num_accepted).num_target_tokens == num_target_tokens


@pytest.mark.parametrize(("token_ids", "num_accepted"), [([1], 2), ([1, 2], 0), ([], -1)])
def test_an_outcome_whose_counts_disagree_is_refused(
    token_ids: list[int], num_accepted: int
) -> None:
    with pytest.raises(ValueError, match=f"{len(token_ids)} tokens with {num_accepted} accepted"):
        VerifyOutcome(token_ids, num_accepted)


@pytest.mark.parametrize(
    ("lengths", "num_accepted", "message"),
    [
        ([1, 2], [0, 0], "at most one bonus token"),
        ([1, 2], [0, 3], "at most one bonus token"),
        ([0, 2], [-1, 1], "at most one bonus token"),
        ([1], [0], "of 2 requests need int32"),
    ],
)
def test_outcomes_that_disagree_are_refused(
    lengths: list[int], num_accepted: list[int], message: str
) -> None:
    arrays = (np.array(values, np.int32) for values in (lengths, num_accepted, [-1, -1]))
    with pytest.raises(ValueError, match=message):
        VerifyOutcomes(np.zeros((2, 4), np.int32), *arrays)


def test_outcomes_of_another_type_are_refused() -> None:
    of_requests = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="got int64"):
        VerifyOutcomes(np.zeros((1, 4), np.int32), of_requests, np.zeros(1, np.int64), of_requests)
