"""Each policy's choice for each request of a batch."""

import numpy as np

from sglang_hvd.allocation.policies import by_frequency, by_payoff, cache_only
from sglang_hvd.types import CacheDraft, DraftSource

CACHE, MODEL, PLAIN = DraftSource.CACHE, DraftSource.MODEL, DraftSource.PLAIN


def draft(score: float) -> CacheDraft:
    return CacheDraft(np.array([1], dtype=np.int32), match_len=1, score=score, source="request")


def test_payoff_takes_the_cache_draft_from_the_threshold_on() -> None:
    just_below = float(np.nextafter(6.0, 0))
    assert by_payoff([6.0, just_below, 30.0, -2.0], 6.0) == [CACHE, MODEL, CACHE, MODEL]


def test_payoff_without_a_cache_draft_takes_the_model_drafter() -> None:
    assert by_payoff([None], 0.0) == [MODEL]


def test_frequency_takes_the_cache_draft_from_the_threshold_on() -> None:
    assert by_frequency([draft(3.0), draft(2.9), None], 3.0) == [CACHE, MODEL, MODEL]


def test_cache_only_takes_every_cache_draft_and_a_plain_step_without_one() -> None:
    assert cache_only([draft(0.1), None]) == [CACHE, PLAIN]


def test_an_empty_batch_needs_nothing() -> None:
    assert by_payoff([], 6.0) == by_frequency([], 6.0) == cache_only([]) == []
