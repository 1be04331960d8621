"""Plans by what every choice brings and costs: policy allocate (docs/allocation.md)."""

from collections.abc import Sequence

import numpy as np

from sglang_hvd.allocation import DraftOdds, StepAllocator
from sglang_hvd.drafter.cycles import Cycles
from sglang_hvd.drafter.expectations import Expectations
from sglang_hvd.drafter.proposals import Proposals
from sglang_hvd.drafter.request import DraftedRequest
from sglang_hvd.types import DraftPlan, DraftSource


class CostPlanner:
    """The allocator's decision as plans, and what was expected of them."""

    def __init__(self, allocator: StepAllocator, expectations: Expectations) -> None:
        self._allocator, self._expectations = allocator, expectations

    def plan(
        self, requests: Sequence[DraftedRequest], proposals: Proposals
    ) -> tuple[list[DraftPlan], Cycles]:
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
        # The predictor is judged by what it says itself of chains, heeded or not.
        taken = trees.take(found.num_cache, prediction.survival, drafts)
        chain_lens, chain_expected = taken.chain_lens, taken.chain_expected
        # A branch alone: the first token that is committed tells of the chain's first, if any.
        is_branch = (chain_lens == 0) & (found.num_cache > 0) & proposals.has_draft
        if is_branch.any():
            chain_lens = np.where(is_branch, np.int32(1), chain_lens)
            chain_expected = np.where(is_branch, prediction.survival[:num, 0], chain_expected)
        cycles = Cycles(
            num_cache=found.num_cache,
            chain_lens=chain_lens,
            chain_expected=chain_expected,
            branch_expected=taken.branch_expected / np.float64(self._expectations.branch_share),
            model_sizes=found.model_size,
            model_steps=np.full(num, found.num_steps, np.int32),
            model_expected=found.model_expected,
        )
        plans = []
        for chosen, payoff, num_model in zip(
            taken.drafts, proposals.payoffs, found.num_model.tolist(), strict=True
        ):
            if num_model:
                source = DraftSource.MODEL if chosen is None else DraftSource.BOTH
                plans.append(DraftPlan(source, chosen, payoff, num_model, found.num_steps))
            else:
                source = DraftSource.PLAIN if chosen is None else DraftSource.CACHE
                plans.append(DraftPlan(source, chosen, payoff))
        return plans, cycles
