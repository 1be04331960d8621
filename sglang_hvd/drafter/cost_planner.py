"""Plans by what every choice brings and costs: policy allocate (docs/allocation.md)."""

from collections.abc import Sequence

import numpy as np

from sglang_hvd.allocation import DraftOdds, StepAllocator
from sglang_hvd.drafter.expectations import Expectations
from sglang_hvd.drafter.proposals import Proposals
from sglang_hvd.drafter.request import DraftedRequest, slots_of
from sglang_hvd.types import DraftPlan, DraftSource


class CostPlanner:
    """The allocator's decision as plans, and what was expected of them."""

    def __init__(self, allocator: StepAllocator, expectations: Expectations) -> None:
        self._allocator, self._expectations = allocator, expectations

    def plan(self, requests: Sequence[DraftedRequest], proposals: Proposals) -> list[DraftPlan]:
        """Row i of the proposals belongs to requests[i]."""
        num, drafts = len(requests), proposals.drafts
        trees, reaches, prediction = proposals.trees, proposals.model_reaches, proposals.prediction
        assert trees is not None
        assert reaches is not None
        assert prediction is not None
        assert prediction.survival is not None
        is_pinned = None
        if any(request.without_cache for request in requests):
            is_pinned = np.array([request.without_cache for request in requests])
        found = self._allocator.allocate(
            slots_of(requests),
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
        taken = trees.take(found.num_cache, prediction.survival, drafts)
        chains = drafts.token_ids[:num, : max(*taken.chain_lens, 1)].copy()
        branch_share = self._expectations.branch_share
        plans = []
        for row, (request, chosen, payoff, num_model) in enumerate(
            zip(requests, taken.drafts, proposals.payoffs, found.num_model.tolist(), strict=True)
        ):
            request.chain, request.chain_len = chains[row], taken.chain_lens[row]
            request.cache_expected = taken.chain_expected[row]
            request.branch_expected = taken.branch_expected[row] / branch_share
            if chosen is not None and request.chain_len == 0:
                # A branch alone: the first token that is committed tells of the chain's first.
                request.chain_len = min(1, int(drafts.num_nodes[row]))
                request.cache_expected = float(prediction.survival[row, 0])
            if not num_model:
                source = DraftSource.PLAIN if chosen is None else DraftSource.CACHE
                plans.append(DraftPlan(source, chosen, payoff))
                continue
            request.model_size = int(found.model_size[row])
            request.model_expected = float(found.model_expected[row])
            source = DraftSource.MODEL if chosen is None else DraftSource.BOTH
            plans.append(DraftPlan(source, chosen, payoff, num_model, found.num_steps))
        return plans
