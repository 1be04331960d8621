"""Quality figures, compared with their definitions and with scikit-learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

from sglang_hvd.replay.core.recordings import mean_over_families
from sglang_hvd.replay.training.quality import (
    Judgement,
    PayoffQuality,
    payoff_quality,
    reliability_curve,
)


def quality(
    predicted: list[float], accepted: list[int], probs: list[float] | None = None
) -> PayoffQuality:
    return payoff_quality(
        Judgement(
            np.array(predicted, np.float32),
            None if probs is None else np.array(probs, np.float32),
            np.array(accepted, np.int32),
        ),
        threshold=6.0,
    )


def test_figures_worked_out_by_hand() -> None:
    measured = quality([9, 7, 6, 2, 1], [8, 3, 6, 6, 0])
    assert measured.num_drafts == 5
    assert measured.oracle_share == 0.6
    assert measured.precision == 2 / 3
    assert measured.recall == 2 / 3
    assert measured.average_precision == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert measured.mean_absolute_error == 2.0
    assert measured.roc_auc == 4 / 6  # of pairs of a draft that reaches it and one that does not
    assert measured.precision_at_recall_60 == 3 / 4
    assert measured.calibration_error is None


def test_probabilities_rank_and_select_if_they_are_known() -> None:
    # Lengths would rank and select the other way round.
    measured = quality([1, 2, 9, 8], [8, 6, 0, 0], [0.9, 0.5, 0.4, 0.1])
    assert (measured.precision, measured.recall, measured.average_precision) == (1, 1, 1)
    assert measured.roc_auc == 1
    assert measured.mean_absolute_error == (7 + 4 + 9 + 8) / 4


def test_calibration_is_the_worst_tenth_of_the_drafts() -> None:
    probs = [index / 100 for index in range(100)]
    accepted = [6 * (index >= 90) for index in range(100)]
    measured = quality([0] * 100, accepted, probs)
    # None of the drafts at .80 to .89 reaches it; the last tenth differs by less.
    assert measured.calibration_error == pytest.approx(0.845, abs=1e-6)
    curve = reliability_curve(np.array(probs, np.float32), np.array(accepted) >= 6)
    assert [num for _, _, num in curve] == [10] * 10
    assert curve[-1][:2] == pytest.approx((0.945, 1.0))


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
def test_ranking_figures_equal_those_of_scikit_learn(rows: list[tuple[int, int]]) -> None:
    predicted, accepted = map(list, zip(*rows, strict=True))
    worth = [a >= 6 for a in accepted]
    measured = quality(predicted, accepted)
    if not any(worth):
        assert measured.average_precision is None
        assert measured.precision_at_recall_60 is None
    else:
        assert measured.average_precision == pytest.approx(
            average_precision_score(worth, predicted)
        )
        precision, recall, _ = precision_recall_curve(worth, predicted)
        assert measured.precision_at_recall_60 == precision[recall >= 0.6].max()
        assert measured.precision_at_recall_78 == precision[recall >= 0.78].max()
    if all(worth) or not any(worth):
        assert measured.roc_auc is None
    else:
        assert measured.roc_auc == pytest.approx(roc_auc_score(worth, predicted))


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="no drafts"):
        quality([], [])


def test_a_family_of_many_files_counts_as_one_of_few() -> None:
    values = [("chat", 1.0), ("code", 4.0), ("chat", 2.0), ("code", None), ("sql", None)]
    assert mean_over_families(values) == (1.5 + 4.0) / 2
    assert mean_over_families([("sql", None)]) is None
