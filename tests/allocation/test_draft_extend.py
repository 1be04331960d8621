"""When the model drafter catches up on what was committed without it."""

from __future__ import annotations

import pytest

from sglang_hvd.allocation import MAX_POSTPONED_TOKENS, DraftExtend

NO_MODEL = [0, 0, 0]


def test_nothing_is_caught_up_with_where_draft_extend_follows_every_step() -> None:
    mode = DraftExtend.EVERY_STEP
    assert not mode.catches_up
    for num_plain in (0, 1, 100):
        assert mode.follows(num_plain)
        assert mode.missing_after(NO_MODEL, [0, 0, 0], [1, 4, 2], num_plain) == [0, 0, 0]


def test_without_the_model_drafter_nothing_is_missing() -> None:
    mode = DraftExtend.NEVER
    assert not mode.catches_up
    assert not mode.follows(num_plain=0)
    assert mode.catching_up(NO_MODEL, [0, 0, 0], num_plain=0) == []
    assert mode.missing_after(NO_MODEL, [0, 0, 0], [1, 4, 2], num_plain=0) == [0, 0, 0]


def test_a_request_catches_up_when_it_drafts() -> None:
    mode = DraftExtend.WHEN_DRAFTING
    assert mode.catches_up
    assert not mode.follows(num_plain=0)
    drafting, missing = [7, 0, 7], [3, 5, 0]
    assert mode.catching_up(drafting, missing, num_plain=0) == [0]
    assert mode.missing_after(drafting, missing, [2, 1, 4], num_plain=0) == [2, 6, 4]
    # For long nobody waits, and what would be due soon is caught up with in the same forward.
    most = MAX_POSTPONED_TOKENS
    assert mode.catching_up(NO_MODEL, [most - 1] * 3, num_plain=3) == []
    assert mode.catching_up(NO_MODEL, [most // 2 - 1, most, most // 2], num_plain=3) == [1, 2]
    assert mode.catching_up([0, 0, 7], [most // 2, 1, 1], num_plain=0) == [0, 2]
    assert not mode.ends_run(most, num_requests=3)


def test_a_run_without_drafts_is_caught_up_with_in_the_next_step_that_has_some() -> None:
    mode = DraftExtend.AFTER_DRAFTS
    missing = [0, 0, 0]
    for num_plain in range(1, 12):
        # Short runs are not worth it.
        assert mode.follows(num_plain) == (num_plain <= 8)
        assert mode.catching_up(NO_MODEL, missing, num_plain) == []
        missing = mode.missing_after(NO_MODEL, missing, [1, 1, 1], num_plain)
        assert missing == [max(num_plain - 8, 0)] * 3
    missing[1] = 0  # a request that has begun since
    assert mode.follows(num_plain=0)
    assert mode.catching_up([0, 0, 3], missing, num_plain=0) == [0, 2]
    assert mode.missing_after([0, 0, 3], missing, [1, 4, 2], num_plain=0) == [0, 0, 0]


@pytest.mark.parametrize(
    ("num_requests", "most"), [(1, 64), (64, 64), (128, 32), (256, 16), (5000, 1)]
)
def test_a_run_is_caught_up_with_before_it_takes_much_memory(num_requests: int, most: int) -> None:
    mode = DraftExtend.AFTER_DRAFTS
    no_model, missing = [0] * num_requests, [0] * num_requests
    lacking = []
    for num_plain in range(1, 200):
        rows = mode.catching_up(no_model, missing, num_plain)
        assert bool(rows) == mode.ends_run(max(missing), num_requests)
        lacking.append(max(missing))
        assert rows in ([], list(range(num_requests)))
        missing = mode.missing_after(no_model, missing, [1] * num_requests, num_plain)
        if rows:
            assert missing == [1] * num_requests
    assert max(lacking) == most
    assert lacking.count(most) > 1


@pytest.mark.parametrize("num_requests", [1, 3, 64, 200, 5000])
@pytest.mark.parametrize("width", [1, 8])
def test_never_more_is_missing_than_memory_is_kept_for(num_requests: int, width: int) -> None:
    mode, most = DraftExtend.WHEN_DRAFTING, 0
    no_model = [0] * num_requests
    missing = [row % width for row in range(num_requests)]  # not all in step
    for _ in range(200):
        missing = mode.missing_after(no_model, missing, [width] * num_requests, num_plain=0)
        most = max(most, sum(missing))
    assert most <= mode.max_missing(num_requests * width)
    assert most > 50 * min(num_requests, 64)
