"""When the model drafter catches up on what was committed without it."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_hvd.allocation import MAX_POSTPONED_TOKENS, DraftExtend

NO_MODEL = [0, 0, 0]


def test_nothing_is_caught_up_with_where_draft_extend_follows_every_step() -> None:
    mode = DraftExtend.EVERY_STEP
    assert not mode.catches_up
    for has_drafts in (False, True):
        assert mode.follows(has_drafts=has_drafts)
        assert mode.missing_after(NO_MODEL, [0, 0, 0], [1, 4, 2], has_drafts=has_drafts) == [0] * 3


def test_without_the_model_drafter_nothing_is_missing() -> None:
    mode = DraftExtend.NEVER
    assert not mode.catches_up
    assert not mode.follows(has_drafts=True)
    assert mode.catching_up(NO_MODEL, [0, 0, 0], has_drafts=True) == []
    assert mode.missing_after(NO_MODEL, [0, 0, 0], [1, 4, 2], has_drafts=True) == [0, 0, 0]


def test_a_request_catches_up_when_it_drafts() -> None:
    mode = DraftExtend.WHEN_DRAFTING
    assert mode.catches_up
    assert not mode.follows(has_drafts=True)
    drafting, missing = [7, 0, 7], [3, 5, 0]
    assert mode.catching_up(drafting, missing, has_drafts=True) == [0]
    assert mode.missing_after(drafting, missing, [2, 1, 4], has_drafts=True) == [2, 6, 4]
    # For long nobody waits.
    missing = [MAX_POSTPONED_TOKENS, MAX_POSTPONED_TOKENS - 1, 0]
    assert mode.catching_up(NO_MODEL, missing, has_drafts=False) == [0]


def test_steps_without_drafts_are_caught_up_with_in_the_next_one_that_has_some() -> None:
    mode = DraftExtend.BEHIND_DRAFTS
    missing = [0, 0, 0]
    for num_steps in range(1, 4):
        assert not mode.follows(has_drafts=False)
        assert mode.catching_up(NO_MODEL, missing, has_drafts=False) == []
        missing = mode.missing_after(NO_MODEL, missing, [1, 1, 1], has_drafts=False)
        assert missing == [num_steps] * 3
    missing[1] = 0  # a request that has begun since
    assert mode.follows(has_drafts=True)
    assert mode.catching_up([0, 0, 3], missing, has_drafts=True) == [0, 2]
    assert mode.missing_after([0, 0, 3], missing, [1, 4, 2], has_drafts=True) == [0, 0, 0]


@pytest.mark.parametrize(("num_requests", "most"), [(1, 64), (64, 64), (128, 32), (256, 16)])
def test_a_run_without_drafts_is_caught_up_with_before_it_takes_much_memory(
    num_requests: int, most: int
) -> None:
    mode = DraftExtend.BEHIND_DRAFTS
    no_model, missing = [0] * num_requests, [0] * num_requests
    lacking = []
    for _ in range(200):
        rows = mode.catching_up(no_model, missing, has_drafts=False)
        lacking.append(sum(missing))
        assert rows in ([], list(range(num_requests)))
        missing = mode.missing_after(no_model, missing, [1] * num_requests, has_drafts=False)
        if rows:
            assert missing == [1] * num_requests
    assert max(lacking) == most * num_requests
    assert np.mean(lacking) > max(lacking) / 3
