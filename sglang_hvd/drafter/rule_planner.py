"""Plans by a rule: request by request, and drafts as long as a verification takes."""

import math
from collections.abc import Sequence

import numpy as np

from sglang_hvd.allocation import policies
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter.cycles import Cycles
from sglang_hvd.drafter.expectations import Expectations
from sglang_hvd.drafter.proposals import Proposals
from sglang_hvd.drafter.request import DraftedRequest
from sglang_hvd.types import MATCH_FEATURES, DraftPlan, DraftSource

_SCORE = MATCH_FEATURES.index("score")
_WITH_MODEL = (DraftSource.MODEL, DraftSource.BOTH)


class RulePlanner:
    """Every policy but allocate.

    room: nodes of a verification, root not included.
    num_model_steps, num_model_nodes: of the model drafter's draft, root not included.
    """

    def __init__(
        self,
        config: HvdConfig,
        expectations: Expectations,
        *,
        room: int,
        num_model_steps: int,
        num_model_nodes: int,
    ) -> None:
        self._config, self._expectations = config, expectations
        self._without_cache = DraftSource.MODEL if config.drafts_with_model else DraftSource.PLAIN
        self._room, self._num_model_steps = room, num_model_steps
        self._num_model_nodes = num_model_nodes
        self._frequency_threshold = (
            num_model_steps if config.frequency_threshold is None else config.frequency_threshold
        )

    def plan(
        self, requests: Sequence[DraftedRequest], proposals: Proposals
    ) -> tuple[list[DraftPlan], Cycles]:
        """Row i of the proposals belongs to requests[i]."""
        payoffs = proposals.payoffs
        sources = self._decide(proposals, payoffs)
        num_nodes = proposals.drafts.num_nodes[: len(requests)].tolist()
        num_cache = np.zeros(len(requests), np.int32)
        for row, (request, source) in enumerate(zip(requests, sources, strict=True)):
            if request.without_cache:
                source = self._without_cache
            room = self._room
            if source is DraftSource.BOTH:
                room -= self._num_model_nodes
                assert room >= 0, "the model drafter's draft fits into a verification"
                if room == 0:
                    source = DraftSource.MODEL
            sources[row] = source
            if source in (DraftSource.CACHE, DraftSource.BOTH):
                num_cache[row] = min(num_nodes[row], room)
        drafts = proposals.drafts.chains(num_cache)
        model = self._num_model_nodes, self._num_model_steps
        plans = [
            DraftPlan(source, draft, payoff, *(model if source in _WITH_MODEL else ()))
            for source, draft, payoff in zip(sources, drafts, payoffs, strict=True)
        ]
        is_with_model = np.array([source in _WITH_MODEL for source in sources])
        whole = np.full(len(requests), np.nan, np.float32)
        cycles = Cycles(
            num_cache=num_cache,
            chain_lens=num_cache,
            chain_expected=whole,
            branch_expected=np.zeros(len(requests)),
            model_sizes=np.where(is_with_model, np.int32(self._num_model_nodes), np.int32(0)),
            model_steps=np.full(len(requests), self._num_model_steps, np.int32),
            model_expected=whole,
        )
        return plans, cycles

    def _decide(self, proposals: Proposals, payoffs: Sequence[float | None]) -> list[DraftSource]:
        has_draft = proposals.has_draft.tolist()
        match self._config.policy:
            case "payoff":
                by_payoff = self._by_payoff(proposals, payoffs)
                in_fallback = self._expectations.in_fallback(proposals.drafts, len(has_draft))
                if in_fallback is None:
                    return by_payoff
                by_frequency = self._by_frequency(proposals)
                return [
                    by_frequency[row] if is_off else by_payoff[row]
                    for row, is_off in enumerate(in_fallback)
                ]
            case "frequency":
                return self._by_frequency(proposals)
            case "cache":
                return policies.cache_only(has_draft)
            case "model":
                return [DraftSource.MODEL] * len(has_draft)
            case "both":
                return [DraftSource.BOTH if has else DraftSource.MODEL for has in has_draft]
            case "allocate":
                raise AssertionError("CostPlanner decides")

    def _by_payoff(
        self, proposals: Proposals, payoffs: Sequence[float | None]
    ) -> list[DraftSource]:
        assert proposals.prediction is not None
        assert proposals.model_payoffs is not None
        threshold = self._config.threshold
        if threshold is None:
            return policies.by_comparison(payoffs, proposals.model_payoffs.tolist())
        probs = proposals.prediction.reaches(math.ceil(threshold))
        if probs is None:
            return policies.by_payoff(payoffs, threshold)
        return policies.by_odds(proposals.of_drafts(probs))

    def _by_frequency(self, proposals: Proposals) -> list[DraftSource]:
        scores = proposals.drafts.features[: proposals.num_requests, _SCORE]
        return policies.by_frequency(proposals.of_drafts(scores), self._frequency_threshold)
