"""What training looks at of drafts."""

from dataclasses import fields, replace

import numpy as np

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.replay.core.training_rows import Lessons
from tests.payoff.made_up import random_rows


def assert_same(found: Lessons, expected: Lessons) -> None:
    for field in fields(Lessons):
        of_found, of_expected = (getattr(lessons, field.name) for lessons in (found, expected))
        np.testing.assert_array_equal(of_found, of_expected, err_msg=field.name)
        assert of_found.dtype == of_expected.dtype, field.name


def test_the_tokens_that_were_judged_are_those_up_to_the_first_rejected() -> None:
    rows = random_rows(4, longest=9)
    rows = replace(
        rows,
        draft_lens=np.array([3, 3, 9, 9], np.int32),
        accepted_lens=np.array([0, 3, 7, 9], np.int32),
    )
    lessons = Lessons.of(rows)
    assert lessons.num_judged.tolist() == [1, 3, 8, 9]  # none follows on what was accepted whole
    assert lessons.first.tolist() == [0, 1, 4, 12]
    for row, (first, num) in enumerate(zip(lessons.first, lessons.num_judged, strict=True)):
        of_row = lessons.positions[first : first + num]
        np.testing.assert_array_equal(of_row, rows.positions[row, :num])
    np.testing.assert_array_equal(lessons.head, rows.positions[:, :WORTH_LEN])
    assert lessons.is_long.tolist() == [False, False, True, True]
    assert lessons.weights.tolist() == [1, 1, 1, 1]


def test_parts_of_drafts_of_other_lengths_are_put_together() -> None:
    parts = [Lessons.of(random_rows(50, seed=seed, longest=4 * seed)) for seed in (1, 2, 3)]
    whole = Lessons.concatenate(parts)
    assert len(whole) == 150
    assert whole.head.shape[1] == WORTH_LEN
    for number, part in enumerate(parts):
        found = whole.select(np.arange(50 * number, 50 * number + 50))
        longest = part.head.shape[1]
        assert not found.head[:, longest:].any()
        assert_same(replace(found, head=found.head[:, :longest]), part)


def test_some_are_drawn_with_all_that_is_theirs() -> None:
    lessons = Lessons.of(random_rows(200)).weighted(np.arange(200, dtype=np.float32))
    drawn = lessons.sample(50, seed=3)
    rows = drawn.weights.astype(np.intp)
    assert len(set(rows)) == len(drawn) == 50
    assert_same(drawn, lessons.select(rows))
    for row, first, num in zip(rows, drawn.first, drawn.num_judged, strict=True):
        start = lessons.first[row]
        np.testing.assert_array_equal(
            drawn.positions[first : first + num], lessons.positions[start : start + num]
        )
    assert lessons.sample(200, seed=3) is lessons
