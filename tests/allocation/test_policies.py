"""Each policy's choice for each request of a batch."""

import numpy as np

from sglang_hvd.allocation.policies import (
    by_comparison,
    by_frequency,
    by_odds,
    by_payoff,
    cache_only,
)
from sglang_hvd.types import DraftSource

CACHE, MODEL, PLAIN = DraftSource.CACHE, DraftSource.MODEL, DraftSource.PLAIN


def test_payoff_takes_the_cache_draft_from_the_threshold_on() -> None:
    just_below = float(np.nextafter(6.0, 0))
    assert by_payoff([6.0, just_below, 30.0, -2.0], 6.0) == [CACHE, MODEL, CACHE, MODEL]


def test_payoff_without_a_cache_draft_takes_the_model_drafter() -> None:
    assert by_payoff([None], 0.0) == [MODEL]


def test_odds_take_the_cache_draft_when_it_is_as_likely_as_not() -> None:
    just_below = float(np.nextafter(0.5, 0))
    assert by_odds([0.5, just_below, 1.0, None]) == [CACHE, MODEL, CACHE, MODEL]


def test_comparison_takes_the_draft_that_brings_more_and_the_cache_draft_if_both_do() -> None:
    assert by_comparison([2.0, 1.9, 9.0, None], [2.0, 2.0, 8.0, 0.0]) == [
        CACHE,
        MODEL,
        CACHE,
        MODEL,
    ]


def test_frequency_takes_the_cache_draft_from_the_threshold_on() -> None:
    assert by_frequency([3.0, 2.9, None], 3.0) == [CACHE, MODEL, MODEL]


def test_cache_only_takes_every_cache_draft_and_a_plain_step_without_one() -> None:
    assert cache_only([True, False]) == [CACHE, PLAIN]


def test_an_empty_batch_needs_nothing() -> None:
    assert (
        by_payoff([], 6.0)
        == by_odds([])
        == by_comparison([], [])
        == by_frequency([], 6.0)
        == cache_only([])
        == []
    )
