"""Each policy's choice for each request of a batch."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from sglang_hvd.drafter.gates import by_comparison, by_frequency, by_odds, by_payoff

NO_DRAFT = math.nan


def numbers(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def below(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(0)))


def test_payoff_takes_the_cache_draft_from_the_threshold_on() -> None:
    payoffs = numbers(6.0, below(6.0), 30.0, -2.0)
    assert by_payoff(payoffs, 6.0).tolist() == [True, False, True, False]


def test_payoff_without_a_cache_draft_takes_none() -> None:
    assert by_payoff(numbers(NO_DRAFT), 0.0).tolist() == [False]


@pytest.mark.parametrize("threshold", [0.1, 3.1, 6.7])
def test_a_threshold_is_not_rounded_to_the_precision_of_predictions(threshold: float) -> None:
    nearest = numbers(threshold)
    assert by_payoff(nearest, threshold).tolist() == [float(nearest[0]) >= threshold]
    assert by_frequency(nearest, threshold).tolist() == [float(nearest[0]) >= threshold]


def test_odds_take_the_cache_draft_when_it_is_as_likely_as_not() -> None:
    odds = by_odds(numbers(0.5, below(0.5), 1.0, NO_DRAFT))
    assert odds.tolist() == [True, False, True, False]


def test_comparison_takes_the_draft_that_brings_more_and_the_cache_draft_if_both_do() -> None:
    payoffs, of_model = numbers(2.0, 1.9, 9.0, NO_DRAFT), numbers(2.0, 2.0, 8.0, 0.0)
    assert by_comparison(payoffs, of_model).tolist() == [True, False, True, False]


def test_frequency_takes_the_cache_draft_from_the_threshold_on() -> None:
    assert by_frequency(numbers(3.0, 2.9, NO_DRAFT), 3.0).tolist() == [True, False, False]


def test_an_empty_batch_needs_nothing() -> None:
    nothing = numbers()
    for chosen in (
        by_payoff(nothing, 6.0),
        by_odds(nothing),
        by_comparison(nothing, nothing),
        by_frequency(nothing, 6.0),
    ):
        assert chosen.tolist() == []
