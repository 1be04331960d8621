"""The policies' decisions: which drafts each request verifies, by a rule or by costs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_hvd._native import StepCore
from sglang_hvd.allocation import RowLimits, StepAllocator
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter.proposer import ChainPrediction, Proposals, TreePrediction
from sglang_hvd.drafter.request import BatchLimits, DraftedBatch
from sglang_hvd.drafter.sources import CacheSource
from sglang_hvd.types import SCORE, SOURCES, DraftPlans, ExpectedGains, HostDrafts, SourceTable

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]

_MODEL = SOURCES.bit_of("model")
assert SOURCES.bit_of("cache") == 1, "RulePlanner takes True for the set of the cache"


class RulePlanner:
    """Every policy but allocate: decides request by request, and verifies drafts of any length that
    fits into a verification.

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

    def expected(self, plans: DraftPlans, proposals: Proposals) -> ExpectedGains:
        """What the choices of these plans were expected to gain, as the policy predicts it. Policy
        frequency has the suffix cache's own estimate, its score."""
        gains = ExpectedGains.unknown(len(plans))
        match self._config.policy:
            case "payoff":
                predicted = proposals.predicted
                assert isinstance(predicted, ChainPrediction), "the proposals are of another policy"
                gains.cache[:] = proposals.where_drafted(predicted.prediction.accepted_lens)
                gains.model[:] = predicted.model_lens
            case "frequency":
                scores = proposals.drafts.matches[: proposals.num_requests, SCORE]
                gains.cache[:] = proposals.where_drafted(scores)
        takes_cache, takes_model = plans.drafts.num_nodes > 0, plans.num_model_nodes > 0
        gains.verified[:] = np.select(
            [takes_cache & takes_model, takes_cache, takes_model],
            [gains.both, gains.cache, gains.model],
            np.float32(0),
        )
        return gains

    def _takes_cache(self, proposals: Proposals) -> Bool:
        match self._config.policy:
            case "payoff":
                predicted = proposals.predicted
                assert isinstance(predicted, ChainPrediction), "the proposals are of another policy"
                by_payoff = self._by_payoff(proposals, predicted)
                in_fallback = self._cache.in_fallback(proposals.drafts, proposals.num_requests)
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


class CostPlanner:
    """Policy allocate: decides by what every choice gains and costs.

    docs/experiments/allocation.md derives the rule.

    core: decides, by the allocator.
    table: the draft sources; those on the device are the allocator's drafters, in the same order.
    """

    def __init__(self, core: StepCore, allocator: StepAllocator, table: SourceTable) -> None:
        self._core, self._allocator, self._table = core, allocator, table

    def choose(self, batch: DraftedBatch, proposals: Proposals, *, next_waits: bool) -> DraftPlans:
        """The proposals are the latest, of the same batch. Their cycles begin in the core.
        next_waits: see StepAllocator.allocate."""
        predicted, num = _of_trees(proposals), len(batch)
        ints, floats = np.empty((4, num), np.int32), np.empty((2, num), np.float32)
        flags = np.empty((2, num), np.uint8)
        nodes = np.empty((2, num, predicted.trees.token_ids.shape[1]), np.int32)
        drafter, num_steps, max_host = self._core.allocate(
            batch.of_cache,
            batch.of_rest,
            self._limits(batch, predicted),
            self._allocator.costs_of(num),
            self._allocator.costs.context or 0.0,
            next_waits,
            ints,
            floats,
            flags,
            nodes,
        )
        num_host, num_model, model_sizes, chain_lens = ints
        drafts = HostDrafts(
            token_ids=nodes[0, :, :max_host],
            parents=nodes[1, :, :max_host],
            num_nodes=num_host,
            are_trees=flags[0].view(np.bool_),
            matches=proposals.drafts.matches[:num].copy(),
        )
        return DraftPlans(
            drafts=drafts,
            num_model_nodes=num_model,
            model_sizes=model_sizes,
            model_steps=np.full(num, num_steps, np.int32),
            predicted=predicted.prediction.accepted_lens,
            chain_lens=chain_lens,
            chain_predicted=floats[1],
            model_predicted=floats[0],
            host_sources=flags[1],
            drafter=self._table.device_bits[drafter],
            table=self._table,
        )

    def expected(
        self, plans: DraftPlans, proposals: Proposals, asked: Sequence[int]
    ) -> ExpectedGains:
        """What the choices of the asked rows were expected to gain, by the acceptance that the
        allocator was given; NaN in other rows. The cache draft includes its branches."""
        predicted, num, rows = _of_trees(proposals), len(asked), np.asarray(asked)
        drafters, of_host = self._allocator.drafters, predicted.trees.num_nodes[rows]
        full = np.full(num, len(drafters[0].sizes) - 1)
        all_steps, none = np.full(num, drafters[0].num_steps[-1]), np.zeros(num, np.int64)
        # The sizes of all drafters stand one after the other.
        place = self._table.device_bits.index(plans.drafter)
        first = sum(len(drafter.sizes) for drafter in drafters[:place])
        chosen = first + np.searchsorted(drafters[place].sizes, plans.model_sizes[rows])
        steps = np.where(plans.num_model_nodes[rows] > 0, plans.model_steps[rows], 0)
        has_draft, unknown = of_host > 0, np.float32(np.nan)
        of_cache = _gains(predicted, rows, of_host, full, none)
        of_both = _gains(predicted, rows, of_host, full, all_steps)
        gains = ExpectedGains.unknown(len(plans))
        gains.cache[rows] = np.where(has_draft, of_cache, unknown)
        gains.model[rows] = _gains(predicted, rows, none, full, all_steps)
        gains.both[rows] = np.where(has_draft, of_both, unknown)
        gains.verified[rows] = _gains(predicted, rows, plans.drafts.num_nodes[rows], chosen, steps)
        return gains

    def wants_drafts(self, batch: DraftedBatch, proposals: Proposals) -> bool:
        """Whether drafts would have been better in a step that was launched without any. Its cycles
        begin in the core. The proposals are the latest, of the same batch."""
        return self._core.wants_drafts(
            batch.of_cache,
            batch.of_rest,
            self._limits(batch, _of_trees(proposals)),
            self._allocator.costs_of(len(batch)),
            self._allocator.costs.context or 0.0,
        )

    def _limits(self, batch: DraftedBatch, predicted: TreePrediction) -> RowLimits | None:
        limits, num = batch.limits, len(batch)
        if limits is None:
            return None
        whole = self._allocator.drafters[0].sizes[-1]
        room = self._allocator.widest(num) - 1
        num_model = np.minimum(limits.max_tokens, whole * limits.take_model).astype(np.int32)
        left = np.minimum(limits.max_tokens, room) - num_model
        num_host = np.minimum(predicted.trees.num_nodes[:num], left) * limits.take_cache
        return RowLimits(limits.are_fixed, num_host, num_model, limits.max_tokens)


def _of_trees(proposals: Proposals) -> TreePrediction:
    assert isinstance(proposals.predicted, TreePrediction), "the proposals are of another policy"
    return proposals.predicted


def _gains(
    predicted: TreePrediction,
    rows: npt.NDArray[np.integer[Any]],
    num_host: npt.NDArray[np.integer[Any]],
    sizes: npt.NDArray[np.integer[Any]],
    num_steps: npt.NDArray[np.integer[Any]],
) -> Float32:
    """Predicted accepted tokens of two drafts in one tree, float32[len(rows)]: by predict_both of
    allocation/native/allocate.hpp, for a report.

    rows: the requests. num_host: first nodes of each host draft. sizes: place of the size of each
        draft from the device, among the sizes of all drafters. num_steps: its steps, 0 for no such
        draft.
    """
    trees = predicted.trees
    is_taken = np.arange(trees.probs.shape[1]) < num_host[:, None]
    probs = np.where(is_taken, trees.probs[rows], 0)
    of_model = predicted.model_acceptance.of_all[rows, sizes]
    if_right = predicted.model_acceptance.if_cache_right[rows, sizes]
    depths = np.arange(1, of_model.shape[1] + 1)
    is_at = trees.depths[rows, :, None] == depths
    of_host = np.minimum((probs[:, :, None] * is_at).sum(axis=1), 1)
    added = np.maximum(of_model - of_host * if_right, 0) * (depths <= num_steps[:, None])
    gains: Float32 = (probs.sum(axis=1) + added.sum(axis=1)).astype(np.float32)
    return gains


def _reach(values: Float32, threshold: float) -> Bool:
    # Compared as float64, since float32 would round the threshold.
    reached: Bool = values.astype(np.float64) >= threshold
    return reached
