"""Asks the suffix cache for the drafts of a batch, and the estimator what to expect of them."""

from collections.abc import Hashable, Sequence

import numpy as np

from sglang_hvd.allocation import CacheTrees
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter.forecasts import AllocationForecast, PayoffForecast
from sglang_hvd.drafter.payoff_estimator import PayoffEstimator
from sglang_hvd.drafter.proposals import Proposals
from sglang_hvd.drafter.request import DraftedRequest, slots_of
from sglang_hvd.payoff import DraftFeatures, RequestTracker
from sglang_hvd.step_clock import Phase, StepClock
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import DraftBatch

# Nodes that the votes are asked for in a batch, and for each request: large batches verify few, and
# asking takes time. Chains are as long as ever.
_BRANCH_NODES, _FEWEST_BRANCH_NODES = 512, 8


class Proposer:
    """Asks the suffix cache and the predictor, into arrays that are used from step to step.

    tracker: None: no features are computed and nothing is predicted.
    max_cache_draft_tokens: the longest draft.
    has_branches: under the allocate policy, drafts are trees.
    """

    def __init__(
        self,
        config: HvdConfig,
        cache: SuffixCache,
        tracker: RequestTracker | None,
        estimator: PayoffEstimator,
        *,
        max_cache_draft_tokens: int,
        has_branches: bool,
        clock: StepClock,
    ) -> None:
        self._cache, self._tracker, self._estimator = cache, tracker, estimator
        self.max_cache_draft_tokens = max_cache_draft_tokens
        self._is_by_cost, self._has_branches = config.policy == "allocate", has_branches
        # SuffixDecoding's votes are not the predictor's.
        self._asks_votes = tracker is not None and config.cache_mode == "paper"
        self._clock = clock
        # _votes are _drafts where the votes make these.
        self._drafts = self._votes = DraftBatch.of_size(0, 0)
        self._features = DraftFeatures.of_size(0)
        # Under the allocate policy: what the votes say of branches, and the drafts with these.
        self._branches, self._trees = DraftBatch.of_size(0, 0), CacheTrees(0, 1)

    def nothing(self, num_requests: int) -> Proposals:
        """No draft for any request of the batch."""
        self._reserve(num_requests)
        self._drafts.num_nodes[:num_requests] = 0
        return Proposals(num_requests, self._drafts)

    def propose(
        self,
        rids: Sequence[Hashable],
        requests: Sequence[DraftedRequest],
        max_cache_draft_tokens: int,
    ) -> Proposals:
        """The drafts of a batch and what is expected of them. Row i belongs to requests[i].

        requests: those that the cache knows by these rids.
        max_cache_draft_tokens: the longest draft of this batch; not above the proposer's.

        Raises KeyError for a request that the cache does not know.
        """
        num = len(rids)
        self._reserve(num)
        with self._clock.measure(Phase.PROPOSE):
            self._ask_cache(rids, max_cache_draft_tokens)
        if self._tracker is None:
            return Proposals(num, self._drafts)
        with self._clock.measure(Phase.FEATURES):
            slots, features = slots_of(requests), self._features.first(num)
            self._tracker.write_features(features, slots, self._drafts, self._votes)
        if self._estimator.predictor is None:
            return Proposals(num, self._drafts, features)
        forecast: PayoffForecast | AllocationForecast
        with self._clock.measure(Phase.PREDICT):
            if self._is_by_cost:
                forecast = self._estimator.estimate_trees(
                    slots, self._drafts, features, self._branches, self._trees
                )
            else:
                forecast = self._estimator.estimate(slots, self._drafts, features)
        return Proposals(num, self._drafts, features, forecast)

    def _ask_cache(self, rids: Sequence[Hashable], limit: int) -> None:
        limits = np.full(len(rids), limit, np.int32)
        is_read = self._tracker is not None
        self._cache.propose_into(self._drafts, rids, limits, with_evidence=is_read)
        if self._asks_votes:
            self._cache.propose_into(
                self._votes, rids, limits, by_votes=True, with_evidence=is_read
            )
        if self._has_branches:
            most = max(_BRANCH_NODES // max(len(rids), 1), _FEWEST_BRANCH_NODES)
            limits = np.full(len(rids), min(most, limit), np.int32)
            self._cache.propose_into(self._branches, rids, limits, is_tree=True)

    def _reserve(self, num_requests: int) -> None:
        """Makes the arrays large enough."""
        rows = len(self._drafts.num_nodes)
        if 0 < rows >= num_requests:
            return
        rows, width = max(2 * rows, num_requests, 1), max(self.max_cache_draft_tokens, 1)
        self._drafts = self._votes = DraftBatch.of_size(rows, width)
        if self._asks_votes:
            self._votes = DraftBatch.of_size(rows, width)
        if self._is_by_cost:
            self._branches = DraftBatch.of_size(rows, width)
            self._trees = CacheTrees(rows, width)
        if self._tracker is not None:
            self._features = DraftFeatures.of_size(rows)
