"""Which draft the policies by rule verify for each request of a batch."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter import ChainPrediction, HybridDrafter
from sglang_hvd.payoff import TokenClasses
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import SCORE
from tests.payoff.made_up import constant_survival, linear

NO_DRAFT = math.nan


def numbers(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def below(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(0)))


def takes_cache(
    config: HvdConfig,
    of_drafts: npt.NDArray[np.float32],
    *,
    of_model: npt.NDArray[np.float32] | None = None,
    are_odds: bool = False,
) -> list[bool]:
    """Whether each request verifies its cache draft.

    of_drafts: payoffs and scores of the cache drafts, or the odds of their first tokens; NO_DRAFT
        where there is none.
    """
    num = len(of_drafts)
    has_draft = ~np.isnan(of_drafts)
    predictor = None
    if config.predicts:
        predictor = constant_survival(0.5) if are_odds else linear({})
    made = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=predictor,
        token_classes=TokenClasses.from_strings(["a"]),
        num_model_steps=3,
        num_model_nodes=3,
        verify_width=9,
    )
    for rid in range(num):
        made.start(rid, [])
    proposals = made.propose(range(num))
    # Made-up proposals. Where there is no draft the arrays hold what was there before.
    values = np.where(has_draft, of_drafts, np.float32(1000))
    proposals.drafts.num_nodes[:num] = has_draft
    proposals.drafts.matches[:num, SCORE] = values
    if predictor is not None:
        predicted = proposals.predicted
        assert isinstance(predicted, ChainPrediction)
        predicted.prediction.accepted_lens[:] = values
        predicted.model_lens[:] = 0 if of_model is None else of_model
        if predicted.prediction.acceptance is not None:
            predicted.prediction.acceptance[:, 0] = values
    plans = made.choose(range(num), proposals)
    assert set(plans.sources) <= {"cache", "model"}
    return [source == "cache" for source in plans.sources]


def by_payoff(threshold: float) -> HvdConfig:
    return HvdConfig(policy="payoff", threshold=threshold)


def by_frequency(threshold: float) -> HvdConfig:
    return HvdConfig(policy="frequency", frequency_threshold=threshold)


def test_payoff_takes_the_cache_draft_from_the_threshold_on() -> None:
    payoffs = numbers(6.0, below(6.0), 30.0, -2.0)
    assert takes_cache(by_payoff(6.0), payoffs) == [True, False, True, False]


def test_payoff_without_a_cache_draft_takes_none() -> None:
    assert takes_cache(by_payoff(0.0), numbers(NO_DRAFT)) == [False]


@pytest.mark.parametrize("threshold", [0.1, 3.1, 6.7])
def test_a_threshold_is_not_rounded_to_the_precision_of_predictions(threshold: float) -> None:
    nearest = numbers(threshold)
    for rule in (by_payoff, by_frequency):
        assert takes_cache(rule(threshold), nearest) == [float(nearest[0]) >= threshold]


def test_odds_take_the_cache_draft_when_it_is_as_likely_as_not() -> None:
    odds = numbers(0.5, below(0.5), 1.0, NO_DRAFT)
    assert takes_cache(by_payoff(1.0), odds, are_odds=True) == [True, False, True, False]


def test_comparison_takes_the_draft_that_brings_more_and_the_cache_draft_if_both_do() -> None:
    payoffs, of_model = numbers(2.0, 1.9, 9.0, NO_DRAFT), numbers(2.0, 2.0, 8.0, 0.0)
    config = HvdConfig(policy="payoff")
    assert takes_cache(config, payoffs, of_model=of_model) == [True, False, True, False]


def test_frequency_takes_the_cache_draft_from_the_threshold_on() -> None:
    scores = numbers(3.0, 2.9, NO_DRAFT)
    assert takes_cache(by_frequency(3.0), scores) == [True, False, False]


@pytest.mark.parametrize("config", [by_payoff(6.0), by_frequency(6.0), HvdConfig(policy="payoff")])
def test_an_empty_batch_needs_nothing(config: HvdConfig) -> None:
    assert takes_cache(config, numbers()) == []
