"""Plans by what every choice brings and costs: policy allocate (docs/allocation.md)."""

from collections.abc import Sequence

import numpy as np

from sglang_hvd.allocation import DraftOdds, StepAllocator
from sglang_hvd.drafter.cycles import Cycles
from sglang_hvd.drafter.forecasts import AllocationForecast
from sglang_hvd.drafter.proposals import Proposals
from sglang_hvd.drafter.request import DraftedRequest
from sglang_hvd.types import DraftPlans


class CostPlanner:
    """The allocator's decision as plans, and what was expected of them."""

    def __init__(self, allocator: StepAllocator) -> None:
        self._allocator = allocator

    def plan(
        self, requests: Sequence[DraftedRequest], proposals: Proposals
    ) -> tuple[DraftPlans, Cycles]:
        """Row i of the proposals belongs to requests[i]."""
        num, drafts, forecast = len(requests), proposals.drafts, proposals.forecast
        assert isinstance(forecast, AllocationForecast), "the proposals are of another policy"
        trees, reaches = forecast.trees, forecast.model_reaches
        is_pinned = None
        without_cache = [request.without_cache for request in requests]
        if any(without_cache):
            is_pinned = np.array(without_cache)
        found = self._allocator.allocate(
            forecast.slots,
            DraftOdds(
                trees.probs[:num],
                trees.depths[:num],
                trees.num_nodes[:num],
                reaches.of_all,
                reaches.if_cache_right,
            ),
            is_pinned,
        )
        # The predictor is judged by what it says itself of chains, heeded or not.
        taken = trees.take(
            found.num_cache,
            forecast.prediction_survival,
            drafts,
            width=found.most_cache,
        )
        cycles = Cycles(
            drafts=taken.drafts,
            chain_lens=taken.chain_lens,
            chain_expected=taken.chain_expected,
            branch_expected=taken.branch_expected,
            model_sizes=found.model_size,
            model_steps=np.full(num, found.num_steps, np.int32),
            model_expected=found.model_expected,
        )
        payoffs = forecast.prediction.payoffs
        plans = DraftPlans(taken.drafts, payoffs, found.num_model, found.num_steps)
        return plans, cycles
