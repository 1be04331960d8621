"""Asks the suffix cache for the drafts of a batch, and the sources for the predicted acceptance."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import HostTrees
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter.request import BatchLimits, DraftedRequest, limits_of, slots_of
from sglang_hvd.drafter.sources import CacheSource, ModelSource, joined
from sglang_hvd.payoff import DraftFeatures, ModelAcceptance, Prediction, RequestTracker
from sglang_hvd.step_clock import Phase, StepClock
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import DraftBatch

Float32 = npt.NDArray[np.float32]

# Limits of the trees that the votes propose: nodes of a whole batch, shared equally, and the nodes
# that each request may ask for in any batch. Large batches verify few nodes, and asking takes time.
# Chains have their full length in any batch.
_BRANCH_NODES, _MIN_BRANCH_NODES = 512, 8


@dataclass(frozen=True, slots=True, eq=False)
class ChainPrediction:
    """What policy payoff decides by. Row i belongs to request i.

    prediction: calibrated prediction for the cache drafts.
    model_lens: float32[num_requests], predicted accepted length of the model drafter's draft in
        tokens.
    """

    prediction: Prediction
    model_lens: Float32


@dataclass(frozen=True, slots=True, eq=False)
class TreePrediction:
    """What policy allocate decides by. Row i belongs to request i.

    slots: int32[num_requests], by which the allocator knows the requests.
    prediction: calibrated prediction for the chains that the cache proposes, with probabilities.
    trees: cache drafts to choose from. Their probabilities are the prediction's, or the suffix
        cache's own if the predictor is in fallback.
    model_acceptance: acceptance of the drafts of the model drafter and any other drafter on the
        device, by size.
    """

    slots: npt.NDArray[np.int32]
    prediction: Prediction
    trees: HostTrees
    model_acceptance: ModelAcceptance

    @property
    def chain_acceptance(self) -> Float32:
        """The prediction's probabilities: float32[num_requests, MAX_DRAFT_LEN]."""
        assert self.prediction.acceptance is not None, "of_config refuses others"
        return self.prediction.acceptance


@dataclass(frozen=True, slots=True, eq=False)
class Proposals:
    """The suffix cache's drafts for a batch, and what is predicted of them. Row i belongs to
    request i. The arrays are the proposer's own: they are valid until its next proposals.

    drafts: cache drafts; num_nodes is 0 if the cache proposes nothing.
    features: the predictor's inputs; None in a drafter without token classes.
    predicted: what the policy decides by; None for a policy that predicts nothing.
    """

    num_requests: int
    drafts: DraftBatch
    features: DraftFeatures | None = None
    predicted: ChainPrediction | TreePrediction | None = None

    @property
    def has_draft(self) -> npt.NDArray[np.bool_]:
        """Whether the cache proposes a draft: bool[num_requests]."""
        return self.drafts.num_nodes[: self.num_requests] > 0

    def where_drafted(self, values: Float32) -> Float32:
        """The values of requests with a cache draft, NaN for the others: float32[num_requests]."""
        return np.where(self.has_draft, values, np.float32(np.nan))


class Proposer:
    """Proposes and predicts into arrays that are used from step to step.

    tracker: None: no features are computed and nothing is predicted.
    models: the drafters on the device, the model drafter first; empty for a policy that does not
        predict their drafts.
    max_cache_draft_tokens: the longest draft.
    has_branches: drafts may be trees; for policy allocate only.
    """

    def __init__(
        self,
        config: HvdConfig,
        suffix_cache: SuffixCache,
        tracker: RequestTracker | None,
        cache: CacheSource,
        models: Sequence[ModelSource],
        *,
        max_cache_draft_tokens: int,
        has_branches: bool,
        clock: StepClock,
    ) -> None:
        self._suffix_cache, self._tracker = suffix_cache, tracker
        self._cache, self._models = cache, models
        self.max_cache_draft_tokens = max_cache_draft_tokens
        self._is_by_cost, self._has_branches = config.policy == "allocate", has_branches
        # SuffixDecoding's votes are not the predictor's.
        self._asks_votes = tracker is not None and config.cache_mode == "paper"
        self._clock = clock
        # In cache mode votes the drafts are those of the votes: both names are one object.
        self._drafts = self._votes = DraftBatch.of_size(0, 0)
        self._features = DraftFeatures.of_size(0)
        # Under the allocate policy: trees of the votes, and the drafts with their branches.
        self._branches, self._trees = DraftBatch.of_size(0, 0), HostTrees(0, 1)

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
        """The drafts of a batch and what is predicted of them. Row i belongs to requests[i].

        requests: those that the suffix cache knows by these rids.
        max_cache_draft_tokens: the longest draft of this batch; at most the proposer's.

        Raises KeyError for a request that the suffix cache does not know.
        """
        num = len(rids)
        self._reserve(num)
        with self._clock.measure(Phase.PROPOSE):
            self._ask_cache(rids, max_cache_draft_tokens, limits_of(requests))
        if self._tracker is None:
            return Proposals(num, self._drafts)
        with self._clock.measure(Phase.FEATURES):
            slots, features = slots_of(requests), self._features.first(num)
            self._tracker.write_features(features, slots, self._drafts, self._votes)
        if self._cache.predictor is None:
            return Proposals(num, self._drafts, features)
        with self._clock.measure(Phase.PREDICT):
            predicted = self._predict(slots, features)
        return Proposals(num, self._drafts, features, predicted)

    def _predict(
        self, slots: npt.NDArray[np.int32], features: DraftFeatures
    ) -> ChainPrediction | TreePrediction:
        assert self._models, "a policy that predicts weighs the drafts of all sources"
        prediction = self._cache.predict(slots, self._drafts, features)
        if not self._is_by_cost:
            model_lens = self._models[0].predict_lens(slots, self._drafts, prediction.acceptance)
            return ChainPrediction(prediction, model_lens)
        acceptance = self._cache.acceptance(prediction, self._drafts, len(slots))
        model_acceptance = joined(
            [model.predict_sizes(slots, self._drafts, acceptance) for model in self._models]
        )
        self._trees.join(self._drafts, acceptance, self._branches)
        return TreePrediction(slots, prediction, self._trees, model_acceptance)

    def _ask_cache(self, rids: Sequence[Hashable], limit: int, asked: BatchLimits | None) -> None:
        limits = np.full(len(rids), limit, np.int32) if asked is None else asked.max_chains(limit)
        is_read = self._tracker is not None
        self._suffix_cache.propose_into(self._drafts, rids, limits, with_evidence=is_read)
        if self._asks_votes:
            self._suffix_cache.propose_into(
                self._votes, rids, limits, by_votes=True, with_evidence=is_read
            )
        if self._has_branches:
            num_nodes = max(_BRANCH_NODES // max(len(rids), 1), _MIN_BRANCH_NODES)
            limit = min(num_nodes, limit)
            limits = (
                np.full(len(rids), limit, np.int32) if asked is None else asked.max_branches(limit)
            )
            self._suffix_cache.propose_into(self._branches, rids, limits, is_tree=True)

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
            self._trees = HostTrees(rows, width)
        if self._tracker is not None:
            self._features = DraftFeatures.of_size(rows)
