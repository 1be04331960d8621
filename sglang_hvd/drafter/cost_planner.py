"""Plans by what every choice brings and costs: policy allocate (docs/allocation.md)."""

from collections.abc import Sequence

import numpy as np

from sglang_hvd.allocation import DraftOdds, StepAllocator
from sglang_hvd.drafter.cycles import Cycles
from sglang_hvd.drafter.expectations import Expectations
from sglang_hvd.drafter.proposals import Proposals
from sglang_hvd.drafter.request import DraftedRequest
from sglang_hvd.types import DraftPlans


class CostPlanner:
    """The allocator's decision as plans, and what was expected of them."""

    def __init__(self, allocator: StepAllocator, expectations: Expectations) -> None:
        self._allocator, self._expectations = allocator, expectations

    def plan(
        self, requests: Sequence[DraftedRequest], proposals: Proposals
    ) -> tuple[DraftPlans, Cycles]:
        """Row i of the proposals belongs to requests[i]."""
        num, drafts = len(requests), proposals.drafts
        trees, reaches, prediction = proposals.trees, proposals.model_reaches, proposals.prediction
        assert trees is not None
        assert reaches is not None
        assert prediction is not None
        assert prediction.survival is not None
        is_pinned = None
        without_cache = [request.without_cache for request in requests]
        if any(without_cache):
            is_pinned = np.array(without_cache)
        assert proposals.slots is not None
        found = self._allocator.allocate(
            proposals.slots,
            DraftOdds(
                trees.probs[:num],
                trees.depths[:num],
                trees.num_nodes[:num],
                reaches.of_all,
                reaches.if_cache_right,
            ),
            is_pinned,
        )
        share = self._expectations.branch_share
        # The predictor is judged by what it says itself of chains, heeded or not.
        taken = trees.take(
            found.num_cache,
            prediction.survival,
            drafts,
            share,
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
        plans = DraftPlans(taken.drafts, prediction.payoffs, found.num_model, found.num_steps)
        return plans, cycles
