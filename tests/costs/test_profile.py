"""What becomes of the times of a profile (plugin/engine/cost_profile.py). How they are taken on a
real engine is seen in tests/e2e/test_costs.py."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_hvd.costs import StepCosts, costs_of_times
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


def of_one_round(
    batch_sizes: list[int],
    verify: list[list[float]],
    extend: list[list[float]],
    draft: list[list[float]],
) -> StepCosts:
    """The table of these times, where contexts take nothing."""
    return costs_of_times(
        batch_sizes,
        *(np.array([times]) for times in (verify, extend, draft)),
        widths=(2, 4),
        draft_steps=(2, 8),
        longer=np.array([verify[-1][0]]),
        contexts=(500, 2000),
        about="made up",
    )


def test_a_table_has_a_plain_step_and_two_batch_sizes() -> None:
    costs = of_one_round([1], [[3.0, 4.0]], [[1.0, 2.0]], [[5.0, 17.0]])
    assert (costs.batch_sizes, costs.widths) == ((1, 2), (1, 2, 4))
    assert costs.verify == ((3, 3, 4),) * 2
    assert costs.draft_extend == ((1, 1, 2),) * 2
    assert (costs.draft_once, costs.draft_round, costs.context) == ((3, 3), (2, 2), None)
    costs = of_one_round(
        [1, 4], [[3.0, 4.0], [2.0, NAN]], [[1.0, 2.0], [3.0, NAN]], [[5.0, 17.0], [6.0, 12.0]]
    )
    assert costs.batch_sizes == (1, 4)
    assert costs.verify[1] == (3, 3, 4)  # more requests never cost less
    assert (costs.draft_once, costs.draft_round) == ((3, 5), (2, 2))


def of_rounds(times: list[list[list[float]]], longer: list[float]) -> StepCosts:
    """The table of rounds of times, for 1 and 4 requests of 500 tokens of context each, and 2,000
    in the longer verifications."""
    return costs_of_times(
        [1, 4],
        *(np.array(times),) * 3,
        widths=(1, 4),
        draft_steps=(2, 8),
        longer=np.array(longer),
        contexts=(500, 2000),
        about="made up",
    )


def test_contexts_have_a_price_of_their_own() -> None:
    costs = of_rounds([[[3.0, 4.0], [6.0, 9.0]]], [12.0])
    assert costs.context == 1.0  # microseconds: 6 ms for 4 requests of 1,500 more tokens
    assert costs.verify == ((2.5, 3.5), (4, 7))
    assert costs.verify_ms(4, [1])[0] + costs.context_ms(4 * 500) == pytest.approx(6.0)


def test_longer_contexts_that_took_no_longer_have_no_price() -> None:
    costs = of_rounds([[[3.0, 4.0], [6.0, 9.0]]], [5.0])
    assert costs.context is None
    assert costs.verify == ((3, 4), (6, 9))


def test_the_shortest_of_all_rounds_counts() -> None:
    """What is disturbed in one round, whichever part it is, is timed in another."""
    quiet = [[3.0, 4.0], [6.0, 9.0]]
    disturbed = [[3.0, 40.0], [6.0, 9.0]], [[30.0, 4.0], [60.0, 9.0]]
    assert of_rounds([*disturbed], [99.0, 12.0, 50.0]) == of_rounds([quiet], [12.0])
