"""Quality figures against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hvd.replay.metrics import PayoffQuality, payoff_quality


def quality(predicted: list[float], accepted: list[int], threshold: float = 6.0) -> PayoffQuality:
    return payoff_quality(
        np.array(predicted, dtype=np.float32),
        np.array(accepted, dtype=np.int32),
        threshold=threshold,
    )


def test_figures_worked_out_by_hand() -> None:
    measured = quality([9, 7, 6, 2, 1], [8, 3, 6, 6, 0])
    assert measured.num_drafts == 5
    assert measured.oracle_share == 0.6
    assert measured.precision == 2 / 3
    assert measured.recall == 2 / 3
    assert measured.average_precision == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert measured.mean_absolute_error == 2.0


def test_without_any_selected_draft_there_is_no_precision() -> None:
    measured = quality([1, 2], [7, 0])
    assert (measured.precision, measured.recall) == (None, 0)


def test_without_any_draft_worth_verifying_there_is_no_recall() -> None:
    measured = quality([7, 2], [1, 0])
    assert (measured.precision, measured.recall, measured.average_precision) == (0, None, None)


def test_the_order_of_equal_predictions_does_not_matter() -> None:
    assert quality([5, 5, 5, 1], [7, 0, 0, 0]) == quality([5, 5, 5, 1], [0, 0, 7, 0])
    assert quality([5, 5], [7, 0]).average_precision == 0.5


ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=30)


@given(ROWS)
def test_average_precision_sums_precision_over_gained_recall(rows: list[tuple[int, int]]) -> None:
    predicted, accepted = map(list, zip(*rows, strict=True))
    num_worth = sum(a >= 6 for a in accepted)
    if num_worth == 0:
        assert quality(predicted, accepted).average_precision is None
        return
    expected = recall = 0.0
    for threshold in sorted(set(predicted), reverse=True):
        selected = [a for p, a in rows if p >= threshold]
        num_hits = sum(a >= 6 for a in selected)
        expected += (num_hits / num_worth - recall) * num_hits / len(selected)
        recall = num_hits / num_worth
    assert quality(predicted, accepted).average_precision == pytest.approx(expected)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="no drafts"):
        quality([], [])
