"""What becomes of the times of a profile (plugin/engine/cost_profile.py). How they are taken on a
real engine is seen in tests/e2e/test_costs.py."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_hvd.costs import costs_of_times
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


NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "columns", "table"),
    [
        # What falls was noise, along either axis.
        ([[3, 2, 4], [1, 5, 6]], [1, 2, 4], [[3, 3, 4], [3, 5, 6]]),
        # No plain step was timed: it costs what the narrowest does.
        ([[3, 4], [5, 6]], [1, 2, 4], [[3, 3, 4], [5, 5, 6]]),
        # The wide steps of many requests were not timed: on with the last slope, by nodes.
        ([[1, 2, 4], [2, 5, NAN]], [1, 2, 4], [[1, 2, 4], [2, 5, 11]]),
        # ... or, of one time alone, as in the row above.
        ([[2, 4, 6], [3, NAN, NAN]], [1, 2, 4], [[2, 4, 6], [3, 6, 9]]),
        ([[2, 4, 6], [3, NAN, NAN]], [1, 2, 4, 8], [[2, 2, 4, 6], [3, 3, 6, 9]]),
    ],
)
def test_a_table_rises_and_is_whole(
    rows: list[list[float]], columns: list[int], table: list[list[float]]
) -> None:
    found = rising_table(np.array(rows, float), columns)
    assert found == tuple(tuple(map(float, row)) for row in table)


def test_a_table_has_a_plain_step_and_two_batch_sizes() -> None:
    verify, extend, draft = np.array([[3.0, 4.0]]), np.array([[1.0, 2.0]]), np.array([[5.0, 17.0]])
    costs = costs_of_times(
        [1], verify, extend, draft, widths=(2, 4), draft_steps=(2, 8), about="made up"
    )
    assert (costs.batch_sizes, costs.widths) == ((1, 2), (1, 2, 4))
    assert costs.verify == ((3, 3, 4),) * 2
    assert costs.draft_extend == ((1, 1, 2),) * 2
    assert (costs.draft_once, costs.draft_round) == ((3, 3), (2, 2))
    costs = costs_of_times(
        [1, 4],
        np.array([[3.0, 4.0], [2.0, NAN]]),
        np.array([[1.0, 2.0], [3.0, NAN]]),
        np.array([[5.0, 17.0], [6.0, 12.0]]),
        widths=(2, 4),
        draft_steps=(2, 8),
        about="made up",
    )
    assert costs.batch_sizes == (1, 4)
    assert costs.verify[1] == (3, 3, 4)  # more requests never cost less
    assert (costs.draft_once, costs.draft_round) == ((3, 5), (2, 2))


def test_contexts_have_a_price_of_their_own() -> None:
    times = np.array([[3.0, 4.0], [6.0, 9.0]])
    costs = costs_of_times(
        [1, 4],
        times,
        times,
        times,
        widths=(1, 4),
        draft_steps=(2, 8),
        token_ms=0.001,
        context=500,
        about="made up",
    )
    assert costs.verify == ((2.5, 3.5), (4, 7))
    assert costs.context == 1.0
    assert costs.verify_ms(4, [1])[0] + costs.context_ms(4 * 500) == pytest.approx(6.0)
