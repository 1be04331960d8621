"""What becomes of the times of a profile (plugin/engine/cost_profile.py). How they are taken on a
real engine is seen in tests/e2e/test_costs.py."""

from __future__ import annotations

import pytest

from sglang_hvd.costs import BatchTimes, costs_of_times, shortest_times
from sglang_hvd.costs.profile import parts_of_draft, rising_table


@pytest.mark.parametrize(
    ("steps", "times", "once", "of_round"),
    [
        ([2, 8], [5.0, 17.0], 3.0, 2.0),  # 3 + 1 x 2, and 3 + 7 x 2
        ([1, 4], [3.0, 9.0], 3.0, 2.0),
        ([3], [8.0], 0.0, 4.0),  # nothing tells the parts apart
        ([1], [3.0], 3.0, 0.0),
        ([2, 8], [5.0, 4.0], 5.0, 0.0),  # noise: more steps take no less
        ([4, 5], [3.0, 9.0], 0.0, 6.0),
    ],
)
def test_a_draft_is_its_rounds_and_what_it_takes_once(
    steps: list[int], times: list[float], once: float, of_round: float
) -> None:
    assert parts_of_draft(steps, times) == pytest.approx((once, of_round))


@pytest.mark.parametrize(
    ("rows", "columns", "table"),
    [
        # What falls was noise, along either axis.
        ([[3, 2, 4], [1, 5, 6]], [1, 2, 4], [[3, 3, 4], [3, 5, 6]]),
        # No plain step was timed: it costs what the narrowest does.
        ([[3, 4], [5, 6]], [1, 2, 4], [[3, 3, 4], [5, 5, 6]]),
        # The wide steps of many requests were not timed: on with the last slope, by nodes.
        ([[1, 2, 4], [2, 5]], [1, 2, 4], [[1, 2, 4], [2, 5, 11]]),
        # ... or, of one time alone, as in the row above.
        ([[2, 4, 6], [3]], [1, 2, 4], [[2, 4, 6], [3, 6, 9]]),
        ([[2, 4, 6], [3]], [1, 2, 4, 8], [[2, 2, 4, 6], [3, 3, 6, 9]]),
    ],
)
def test_a_table_rises_and_is_whole(
    rows: list[list[float]], columns: list[int], table: list[list[float]]
) -> None:
    assert rising_table(rows, columns) == tuple(tuple(map(float, row)) for row in table)


def test_the_shortest_time_of_each_part_counts() -> None:
    found = shortest_times(
        [BatchTimes(2, (3, 5), (1, 2), (4,)), BatchTimes(2, (4, 4), (2, 1), (3,))]
    )
    assert found == BatchTimes(2, (3, 4), (1, 1), (3,))


def test_a_table_has_a_plain_step_and_two_batch_sizes() -> None:
    alone = BatchTimes(1, (3.0, 4.0), (1.0, 2.0), (5.0, 17.0))
    costs = costs_of_times([alone], widths=(2, 4), draft_steps=(2, 8), about="made up")
    assert (costs.batch_sizes, costs.widths) == ((1, 2), (1, 2, 4))
    assert costs.verify == ((3, 3, 4),) * 2
    assert costs.draft_extend == ((1, 1, 2),) * 2
    assert (costs.draft_once, costs.draft_round) == ((3, 3), (2, 2))
    many = BatchTimes(4, (2.0,), (3.0,), (6.0, 12.0))
    costs = costs_of_times([alone, many], widths=(2, 4), draft_steps=(2, 8), about="made up")
    assert costs.batch_sizes == (1, 4)
    assert costs.verify[1] == (3, 3, 4)  # more requests never cost less
    assert (costs.draft_once, costs.draft_round) == ((3, 5), (2, 2))
