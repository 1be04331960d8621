"""Plans by a rule: request by request, and drafts as long as a verification takes."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter.cycles import Cycles
from sglang_hvd.drafter.forecasts import PayoffForecast
from sglang_hvd.drafter.payoff_estimator import PayoffEstimator
from sglang_hvd.drafter.proposals import Proposals
from sglang_hvd.drafter.request import DraftedRequest
from sglang_hvd.types import SCORE, DraftPlans

Bool = npt.NDArray[np.bool_]


class RulePlanner:
    """Every policy but allocate.

    room: nodes of a verification, root not included.
    num_model_steps, num_model_nodes: steps and nodes of the model drafter's draft, root not
        included.
    """

    def __init__(
        self,
        config: HvdConfig,
        estimator: PayoffEstimator,
        *,
        room: int,
        num_model_steps: int,
        num_model_nodes: int,
    ) -> None:
        self._config, self._estimator = config, estimator
        self._num_model_steps, self._num_model_nodes = num_model_steps, num_model_nodes
        self._room = room
        if config.policy == "both":
            assert room >= num_model_nodes, "the model drafter's draft fits into a verification"
            self._room -= num_model_nodes
        self._frequency_threshold = (
            num_model_steps if config.frequency_threshold is None else config.frequency_threshold
        )

    def plan(
        self, requests: Sequence[DraftedRequest], proposals: Proposals
    ) -> tuple[DraftPlans, Cycles]:
        """Row i of the proposals belongs to requests[i]."""
        num = len(requests)
        takes_cache = self._takes_cache(proposals)
        without_cache = [request.without_cache for request in requests]
        if any(without_cache):
            takes_cache = takes_cache & ~np.array(without_cache)
        num_cache = np.minimum(proposals.drafts.num_nodes[:num], self._room) * takes_cache
        if self._config.policy == "both":
            takes_model = np.ones(num, np.bool_)
        else:
            takes_model = ~takes_cache & self._config.drafts_with_model
        num_model = takes_model * np.int32(self._num_model_nodes)
        drafts = proposals.drafts.chains(num_cache)
        whole = np.full(num, np.nan, np.float32)
        cycles = Cycles(
            drafts=drafts,
            chain_lens=num_cache,
            chain_expected=whole,
            model_sizes=num_model,
            model_steps=np.full(num, self._num_model_steps, np.int32),
            model_expected=whole,
        )
        forecast = proposals.forecast
        predicted = None if forecast is None else forecast.prediction.accepted_lens
        return DraftPlans(drafts, predicted, num_model, self._num_model_steps), cycles

    def _takes_cache(self, proposals: Proposals) -> Bool:
        match self._config.policy:
            case "payoff":
                forecast = proposals.forecast
                assert isinstance(forecast, PayoffForecast), "the proposals are of another policy"
                by_payoff = self._by_payoff(proposals, forecast)
                in_fallback = self._estimator.in_fallback(proposals.drafts, proposals.num_requests)
                if in_fallback is None:
                    return by_payoff
                return np.where(in_fallback, self._by_frequency(proposals), by_payoff)
            case "frequency":
                return self._by_frequency(proposals)
            case "cache" | "both":
                return proposals.has_draft
            case "model":
                return np.zeros(proposals.num_requests, np.bool_)
            case "allocate":
                raise AssertionError("CostPlanner decides")

    def _by_payoff(self, proposals: Proposals, forecast: PayoffForecast) -> Bool:
        threshold = self._config.threshold
        payoffs = forecast.prediction.accepted_lens
        if threshold is None:
            # The draft of which more tokens are expected to be accepted. It counts tokens, not
            # time: a cycle that drafts with the model takes longer.
            found: Bool = proposals.where_drafted(payoffs) >= forecast.model_payoffs
            return found
        probs = forecast.prediction.prob_accepted(math.ceil(threshold))
        if probs is None:  # the paper's gate (section 3.4)
            return _reach(proposals.where_drafted(payoffs), threshold)
        # The same where the distribution is known: as likely as not to reach the threshold.
        return _reach(proposals.where_drafted(probs), 0.5)

    def _by_frequency(self, proposals: Proposals) -> Bool:
        """ArcticInference's rule, which sets the threshold to the number of tokens the model
        drafter drafts (arctic_inference/vllm/model_runner.py, min_score)."""
        scores = proposals.drafts.matches[: proposals.num_requests, SCORE]
        return _reach(proposals.where_drafted(scores), self._frequency_threshold)


def _reach(estimates: npt.NDArray[np.float32], threshold: float) -> Bool:
    # As numbers of its own precision the threshold would be rounded.
    reached: Bool = estimates.astype(np.float64) >= threshold
    return reached
