"""The cache drafts of a batch and their predicted acceptance, in the arrays of the native step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd._native import StepCore
from sglang_hvd.allocation import HostTrees
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter.request import DraftedBatch
from sglang_hvd.drafter.sources import CacheSource, ModelSource
from sglang_hvd.payoff import DraftFeatures, ModelAcceptance, Prediction
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.step_clock import Phase, StepClock
from sglang_hvd.types import DraftBatch

Float32 = npt.NDArray[np.float32]

# Limits of the trees that the votes propose: nodes of a whole batch, shared equally, and the nodes
# that each request may ask for in any batch. Large batches verify few nodes, and asking takes time.
# Chains have their full length in any batch.
_BRANCH_NODES, _MIN_BRANCH_NODES = 512, 8

# What StepCore.propose returns the seconds of.
_PHASES = (Phase.PROPOSE, Phase.FEATURES, Phase.PREDICT)


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

    prediction: calibrated prediction for the chains that the cache proposes, with probabilities.
    trees: cache drafts to choose from. Their probabilities are the prediction's, or the suffix
        cache's own if the predictor is in fallback.
    model_acceptance: acceptance of the drafts of the model drafter and any other drafter on the
        device, by size.
    """

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


@dataclass(frozen=True, slots=True, eq=False)
class StepArrays:
    """What StepCore writes and reads in each step. Row i belongs to request i.

    votes: the drafts that the votes propose; in cache mode votes the same object as drafts.
    branches: trees that the votes propose, of 0 nodes if drafts must not branch.
    draft_lens, features, positions: as in DraftFeatures.
    accepted_lens, acceptance: as in Prediction.
    tree_acceptance: as acceptance, or the suffix cache's own probabilities in fallback.
    model_lens: float32[max_requests], predicted accepted tokens of the model drafter's full draft.
    model_probs, model_probs_if_right: as in ModelAcceptance, the sizes of one drafter after the
        other.
    trees: cache drafts to choose from.
    """

    drafts: DraftBatch
    votes: DraftBatch
    branches: DraftBatch
    draft_lens: npt.NDArray[np.int32]
    features: Float32
    positions: Float32
    accepted_lens: Float32
    acceptance: Float32
    tree_acceptance: Float32
    model_lens: Float32
    model_probs: Float32
    model_probs_if_right: Float32
    trees: HostTrees

    @classmethod
    def of_size(
        cls, rows: int, width: int, *, asks_votes: bool, models: Sequence[ModelSource], trees: bool
    ) -> "StepArrays":
        """trees: whether drafts become trees, as under policy allocate."""
        drafts, features = DraftBatch.of_size(rows, width), DraftFeatures.of_size(rows)
        num_sizes = sum(len(model.predictor.sizes) for model in models)
        shape = rows, num_sizes, max((model.predictor.num_steps for model in models), default=0)
        return cls(
            drafts=drafts,
            votes=DraftBatch.of_size(rows, width) if asks_votes else drafts,
            branches=DraftBatch.of_size(rows, width if trees else 0),
            draft_lens=features.draft_lens,
            features=features.features,
            positions=features.positions,
            accepted_lens=np.zeros(rows, np.float32),
            acceptance=np.zeros((rows, MAX_DRAFT_LEN), np.float32),
            tree_acceptance=np.zeros((rows, MAX_DRAFT_LEN), np.float32),
            model_lens=np.zeros(rows, np.float32),
            model_probs=np.zeros(shape, np.float32),
            model_probs_if_right=np.zeros(shape, np.float32),
            trees=HostTrees(rows, width if trees else 0),
        )


class Proposer:
    """Proposes and predicts into arrays that are used from step to step.

    core: does the work.
    cache: the source of the drafts, whose predictor may change.
    models: the drafters on the device, the model drafter first; empty for a policy that does not
        predict their drafts.
    has_features: whether features are computed.
    max_cache_draft_tokens: the longest draft.
    has_branches: drafts may be trees; for policy allocate only.
    """

    def __init__(
        self,
        config: HvdConfig,
        core: StepCore,
        cache: CacheSource,
        models: Sequence[ModelSource],
        *,
        has_features: bool,
        max_cache_draft_tokens: int,
        has_branches: bool,
        clock: StepClock,
    ) -> None:
        self._core, self._cache, self._models = core, cache, models
        self.max_cache_draft_tokens = max_cache_draft_tokens
        self._is_by_cost, self._has_branches = config.policy == "allocate", has_branches
        self._has_features = has_features
        self._asks_votes = asks_votes(config, has_features=has_features)
        self._clock = clock
        self._arrays = self._make_arrays(1)

    def nothing(self, num_requests: int) -> Proposals:
        """No draft for any request of the batch."""
        drafts = self._reserve(num_requests).drafts
        drafts.num_nodes[:num_requests] = 0
        return Proposals(num_requests, drafts)

    def propose(self, batch: DraftedBatch, max_cache_draft_tokens: int) -> Proposals:
        """The drafts of a batch and what is predicted of them.

        max_cache_draft_tokens: the longest draft of this batch; at most the proposer's.
        """
        num, arrays = len(batch), self._reserve(len(batch))
        max_branch = None
        if self._has_branches:
            num_nodes = max(_BRANCH_NODES // max(num, 1), _MIN_BRANCH_NODES)
            max_branch = min(num_nodes, max_cache_draft_tokens)
        seconds = self._core.propose(
            batch.of_cache, batch.of_rest, batch.limits, max_cache_draft_tokens, max_branch
        )
        for phase, spent in zip(_PHASES, seconds, strict=True):
            self._clock.add(phase, spent)
        if not self._has_features:
            return Proposals(num, arrays.drafts)
        features = DraftFeatures(arrays.draft_lens, arrays.features, arrays.positions).first(num)
        predictor = self._cache.predictor
        if predictor is None:
            return Proposals(num, arrays.drafts, features)
        is_survival = predictor.kind == "survival"
        prediction = Prediction(
            arrays.accepted_lens[:num], arrays.acceptance[:num] if is_survival else None
        )
        predicted: ChainPrediction | TreePrediction
        if self._is_by_cost:
            of_models = ModelAcceptance(arrays.model_probs[:num], arrays.model_probs_if_right[:num])
            predicted = TreePrediction(prediction, arrays.trees, of_models)
        else:
            predicted = ChainPrediction(prediction, arrays.model_lens[:num])
        return Proposals(num, arrays.drafts, features, predicted)

    def _reserve(self, num_requests: int) -> StepArrays:
        """The arrays, made large enough."""
        if (rows := len(self._arrays.draft_lens)) < num_requests:
            self._arrays = self._make_arrays(max(2 * rows, num_requests))
        return self._arrays

    def _make_arrays(self, num_rows: int) -> StepArrays:
        arrays = StepArrays.of_size(
            num_rows,
            max(self.max_cache_draft_tokens, 1),
            asks_votes=self._asks_votes,
            models=self._models,
            trees=self._is_by_cost,
        )
        self._core.use_arrays(arrays)
        return arrays


def asks_votes(config: HvdConfig, *, has_features: bool) -> bool:
    """Whether the features need the drafts of the votes besides those of the cache, since
    SuffixDecoding's drafts are others."""
    return has_features and config.cache_mode == "paper"
