"""The policies by rule in Python: the oracle of the native rule."""

import math

import numpy as np
import numpy.typing as npt

from sglang_hvd.config import HvdConfig, Policy
from sglang_hvd.drafter import ChainPrediction, Proposals
from sglang_hvd.drafter.request import BatchLimits
from sglang_hvd.drafter.sources import CacheSource
from sglang_hvd.types import MATCH_COLUMNS, SCORE, SOURCES, DraftBatch, DraftPlans

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

_MODEL = SOURCES.bit_of("model")
_ORIGIN = MATCH_COLUMNS.index("origin")
assert SOURCES.bit_of("cache") == 1, "RuleOracle takes True for the set of the cache"


def max_chains(limits: BatchLimits, limit: int) -> Int32:
    """Longest cache draft of each request, where it is `limit` for others."""
    lens: Int32 = np.minimum(limits.max_tokens, limit)
    lens[limits.are_fixed & ~limits.take_cache] = 0
    return lens


def max_branches(limits: BatchLimits, limit: int) -> Int32:
    """Nodes of each request's draft that may branch, where they are `limit` for others."""
    nodes: Int32 = np.minimum(limits.max_tokens, limit)
    nodes[limits.are_fixed] = 0  # policy cache verifies chains
    return nodes


def fallbacks(cache: CacheSource, drafts: DraftBatch, num_requests: int) -> list[bool] | None:
    """Whether the predictor is so wrong that it is ignored, for each cache draft; None if it is
    used for all."""
    are_fallback = [] if cache.calibration is None else cache.calibration.native.are_fallback()
    if not any(are_fallback):
        return None
    origins = drafts.matches[:num_requests, _ORIGIN].astype(np.intp)
    has_draft = drafts.num_nodes[:num_requests] > 0
    found: list[bool] = np.array(are_fallback)[np.where(has_draft, origins, 0)].tolist()
    return found


class RuleOracle:
    """Every policy but allocate, as native/rule.hpp decides.

    room: nodes of a verification, root not included.
    num_model_steps, num_model_nodes: steps and nodes of the model drafter's draft, root not
        included.
    """

    def __init__(
        self,
        config: HvdConfig,
        cache: CacheSource,
        *,
        room: int,
        num_model_steps: int,
        num_model_nodes: int,
    ) -> None:
        self._config, self._cache = config, cache
        self._num_model_steps, self._num_model_nodes = num_model_steps, num_model_nodes
        self._room = room
        if config.policy == "both":
            assert room >= num_model_nodes, "the model drafter's draft fits into a verification"
            self._room -= num_model_nodes
        self._frequency_threshold = (
            num_model_steps if config.frequency_threshold is None else config.frequency_threshold
        )

    @property
    def policy(self) -> Policy:
        return self._config.policy

    def choose(self, proposals: Proposals, limits: BatchLimits | None = None) -> DraftPlans:
        """limits: of the requests; None if no request has any."""
        num = proposals.num_requests
        takes_cache = self._takes_cache(proposals)
        if self._config.policy == "both":
            takes_model = np.ones(num, np.bool_)
        else:
            takes_model = ~takes_cache & self._config.drafts_with_model
        if limits is not None:
            own_model = limits.take_model & self._config.drafts_with_model
            takes_cache = np.where(limits.are_fixed, limits.take_cache, takes_cache)
            takes_model = np.where(limits.are_fixed, own_model, takes_model)
        num_cache = np.minimum(proposals.drafts.num_nodes[:num], self._room) * takes_cache
        num_model = takes_model * np.int32(self._num_model_nodes)
        if limits is not None:
            num_model = np.minimum(num_model, limits.max_tokens)
            num_cache = np.minimum(num_cache, limits.max_tokens - num_model)
        predicted, whole = proposals.predicted, np.full(num, np.nan, np.float32)
        return DraftPlans(
            drafts=proposals.drafts.chains(num_cache),
            num_model_nodes=num_model,
            model_sizes=num_model,
            model_steps=np.full(num, self._num_model_steps, np.int32),
            predicted=None if predicted is None else predicted.prediction.accepted_lens.copy(),
            chain_lens=num_cache,
            chain_predicted=whole,
            model_predicted=whole,
            host_sources=(num_cache > 0).view(np.uint8),  # True is the bit of the cache
            drafter=_MODEL,
        )

    def _takes_cache(self, proposals: Proposals) -> Bool:
        match self._config.policy:
            case "payoff":
                predicted = proposals.predicted
                assert isinstance(predicted, ChainPrediction), "the proposals are of another policy"
                by_payoff = self._by_payoff(proposals, predicted)
                in_fallback = fallbacks(self._cache, proposals.drafts, proposals.num_requests)
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
                raise AssertionError("it decides by costs")

    def _by_payoff(self, proposals: Proposals, predicted: ChainPrediction) -> Bool:
        threshold = self._config.threshold
        lens = predicted.prediction.accepted_lens
        if threshold is None:
            # The draft with the longer predicted acceptance. This compares tokens, not time: a
            # cycle that drafts with the model takes longer.
            found: Bool = proposals.where_drafted(lens) >= predicted.model_lens
            return found
        probs = predicted.prediction.prob_accepted(math.ceil(threshold))
        if probs is None:  # the paper's gate (section 3.4)
            return _reach(proposals.where_drafted(lens), threshold)
        # The same with probabilities: the draft reaches the threshold more likely than not.
        return _reach(proposals.where_drafted(probs), 0.5)

    def _by_frequency(self, proposals: Proposals) -> Bool:
        """ArcticInference's rule, which sets the threshold to the number of tokens the model
        drafter drafts (arctic_inference/vllm/model_runner.py, min_score)."""
        scores = proposals.drafts.matches[: proposals.num_requests, SCORE]
        return _reach(proposals.where_drafted(scores), self._frequency_threshold)


def _reach(values: Float32, threshold: float) -> Bool:
    # Compared as float64, since float32 would round the threshold.
    reached: Bool = values.astype(np.float64) >= threshold
    return reached
