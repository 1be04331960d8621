"""Drafts and scores of single texts, worked out by hand."""

import numpy as np
import pytest

from tests.suffix_cache.oracle.matching import Continuation, DraftLimits, best_continuation
from tests.suffix_cache.oracle.token_text import END

GUARD = 64
PAPER = {
    "max_depth": 64,
    "max_draft_tokens": 64,
    "max_spec_factor": 1.0,
    "max_spec_offset": 0.0,
    "min_token_prob": 0.1,
}


def limits(**changes: float) -> DraftLimits:
    return DraftLimits.of(**{**PAPER, **changes})  # type: ignore[arg-type]


def continuation(
    sequences: list[list[int]], context: list[int], draft_limits: DraftLimits
) -> Continuation | None:
    marked = [token for sequence in sequences for token in [*sequence, END]]
    text = np.array([END] * GUARD + marked, dtype=np.int32)
    return best_continuation(text, GUARD, np.array(context, dtype=np.int32), draft_limits)


def test_at_the_papers_settings_a_draft_is_as_long_as_its_match_up_to_half_the_depth() -> None:
    assert limits().max_tokens == (0, *range(1, 33), *range(31, 0, -1))


def test_factor_offset_and_maximum_bound_the_draft() -> None:
    bounds = limits(max_depth=8, max_spec_factor=0.5, max_spec_offset=-1, max_draft_tokens=2)
    assert bounds.max_tokens == (0, 0, 0, 0, 1, 1, 2, 1)
    assert limits(max_depth=6, max_spec_factor=9).max_tokens == (0, 5, 4, 3, 2, 1)
    assert limits(max_depth=5, max_spec_offset=2).at_most(3).max_tokens == (2, 3, 3, 2, 1)


def test_no_match_gives_no_draft() -> None:
    assert continuation([[1, 2, 3]], [9], limits()) is None
    assert continuation([], [9], limits()) is None


def test_a_match_that_nothing_follows_gives_no_draft() -> None:
    assert continuation([[1, 2, 3]], [2, 3], limits()) is None


def test_the_longest_match_gives_the_longest_draft() -> None:
    found = continuation([[1, 2, 3, 4, 5, 6, 7]], [1, 2, 3], limits())
    assert found is not None
    assert (found.token_ids.tolist(), found.match_len, found.score) == ([4, 5, 6], 3, 3.0)


def test_a_context_longer_than_the_match_is_no_obstacle() -> None:
    found = continuation([[1, 2, 3, 4, 5]], [9, 2, 3], limits())
    assert found is not None
    assert (found.token_ids.tolist(), found.match_len) == ([4, 5], 2)


def test_a_draft_does_not_run_into_the_next_sequence() -> None:
    found = continuation([[1, 2, 3], [4, 5, 6]], [1, 2], limits())
    assert found is not None
    assert found.token_ids.tolist() == [3]


def test_the_more_frequent_token_is_drafted_with_its_share_as_probability() -> None:
    found = continuation([[1, 5], [1, 6], [1, 6], [1, 6]], [1], limits())
    assert found is not None
    assert (found.token_ids.tolist(), found.score) == ([6], 0.75)


def test_an_occurrence_that_nothing_follows_lowers_the_probability() -> None:
    # This is how the context itself counts in the request's own text.
    found = continuation([[1, 2, 1]], [1], limits())
    assert found is not None
    assert (found.token_ids.tolist(), found.score) == ([2], 0.5)


def test_probabilities_multiply_along_the_draft_and_add_up_to_the_score() -> None:
    found = continuation([[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 5]], [1], limits(max_spec_factor=2))
    assert found is not None
    assert found.token_ids.tolist() == [2, 3]
    assert found.score == 0.75 + 0.75 * np.float32(2 / 3)


def test_a_draft_ends_before_an_improbable_token() -> None:
    sequences = [[1, 2, n] for n in range(10, 30)]
    found = continuation(sequences, [1, 2], limits())
    assert found is None
    found = continuation(sequences, [1], limits(max_spec_factor=2))
    assert found is not None
    assert found.token_ids.tolist() == [2]


def test_a_shorter_match_wins_with_the_higher_score() -> None:
    # [8, 1] was followed by 2, 7 and by 3, 7; [1] alone mostly by 4.
    sequences = [[8, 1, 2], [8, 1, 3], *([[9, 1, 4]] * 18)]
    found = continuation(sequences, [8, 1], limits())
    assert found is not None
    assert (found.token_ids.tolist(), found.match_len) == ([4], 1)


def test_the_longest_match_wins_among_equal_scores() -> None:
    found = continuation([[7, 8, 1, 5]], [7, 8, 1], limits())
    assert found is not None
    assert (found.token_ids.tolist(), found.match_len) == ([5], 3)


@pytest.mark.parametrize(
    ("followers", "drafted"),
    [
        ([5, 6], 5),  # the first comer leads its equals
        ([5, 6, 6, 5], 5),  # who leads its group passes to the front of the next
        ([5, 5, 6, 6], 6),
        ([5, 5, 6, 7, 7, 6], 6),
        ([5, 5, 6, 7, 7], 5),  # who does not lead goes to its back
    ],
)
def test_ties_are_broken_as_upstream(followers: list[int], drafted: int) -> None:
    found = continuation([[1, token] for token in followers], [1], limits())
    assert found is not None
    assert found.token_ids.tolist() == [drafted]


def test_one_repeated_token_is_no_special_case() -> None:
    found = continuation([[4] * 5000], [4] * 63, limits())
    assert found is not None
    assert found.token_ids.tolist() == [4] * 32
    assert found.match_len == 32
