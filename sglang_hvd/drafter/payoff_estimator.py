"""What the drafts of a batch are expected to bring, corrected by what drafts brought."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import CacheTrees
from sglang_hvd.config import PAPER_THRESHOLD, HvdConfig
from sglang_hvd.drafter.cycles import Cycles
from sglang_hvd.drafter.forecasts import AllocationForecast, PayoffForecast
from sglang_hvd.drafter.request import DraftedRequest
from sglang_hvd.payoff import (
    AcceptancePredictor,
    DraftFeatures,
    FallbackChange,
    ModelFigures,
    ModelPredictor,
    OnlineCalibration,
    OriginFigures,
    Prediction,
    VerifiedModelDrafts,
)
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.types import DraftBatch, VerifyOutcomes

logger = logging.getLogger(__name__)

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


class PayoffEstimator:
    """Estimates before each cycle what drafts bring, and observes after it what they brought.
    Requests are known by slots.

    predictor, model_predictor: of the cache drafts and of the model drafter's; None for a policy
        that predicts nothing.
    """

    def __init__(
        self,
        config: HvdConfig,
        predictor: AcceptancePredictor | None,
        model_predictor: ModelPredictor | None,
    ) -> None:
        self._config = config
        self._model_predictor = model_predictor
        self._predictor: AcceptancePredictor | None = None
        self._calibration: OnlineCalibration | None = None
        if predictor is not None:
            self.use_predictor(predictor)

    @property
    def predictor(self) -> AcceptancePredictor | None:
        """The predictor in use."""
        return self._predictor

    def calibration(self) -> Mapping[str, OriginFigures] | None:
        """How right the predictor is, by origin of the draft; None where it is not calibrated."""
        return None if self._calibration is None else self._calibration.figures()

    def model_figures(self) -> ModelFigures | None:
        """How right the predictions of the model drafter's payoff are; None without any."""
        return None if self._model_predictor is None else self._model_predictor.figures()

    def use_predictor(self, predictor: AcceptancePredictor) -> None:
        """Predicts with this one from now on, and calibrates it from the start. What is known of
        the model drafter stays."""
        if self._config.policy == "allocate":
            assert predictor.kind == "survival", "of_config refuses others"
        self._predictor = predictor
        if self._config.calibrate:
            threshold = self._config.threshold
            self._calibration = OnlineCalibration(
                PAPER_THRESHOLD if threshold is None else threshold
            )

    def start(self, slot: int) -> None:
        """A new request has this slot."""
        if self._model_predictor is not None:
            self._model_predictor.start(slot)

    def estimate(self, slots: Int32, drafts: DraftBatch, features: DraftFeatures) -> PayoffForecast:
        """The forecast of policy payoff. Row i of drafts and features belongs to slots[i]."""
        assert self._model_predictor is not None, "a policy that predicts weighs both drafts"
        prediction = self._predict(slots, drafts, features)
        return PayoffForecast(
            prediction, self._model_predictor.predict(slots, drafts, prediction.acceptance)
        )

    def estimate_trees(
        self,
        slots: Int32,
        drafts: DraftBatch,
        features: DraftFeatures,
        branches: DraftBatch,
        trees: CacheTrees,
    ) -> AllocationForecast:
        """The forecast of policy allocate. Row i of drafts, features and branches belongs to
        slots[i].

        branches: trees of the votes, which may add to the drafts; of 0 nodes where drafts shall
            not branch.
        trees: the forecast's, written here.
        """
        assert self._model_predictor is not None, "a policy that predicts weighs both drafts"
        prediction = self._predict(slots, drafts, features)
        survival = self._heeded(prediction, drafts, len(slots))
        reaches = self._model_predictor.predict_sizes(slots, drafts, survival)
        trees.join(drafts, survival, branches)
        return AllocationForecast(slots, prediction, trees, reaches)

    def in_fallback(self, drafts: DraftBatch, num_requests: int) -> list[bool] | None:
        """Whether the predictor is so wrong that it is not heeded, for each cache draft; None where
        it is heeded for all."""
        if self._calibration is None or not self._calibration.has_fallback:
            return None
        return self._calibration.is_fallback(drafts, num_requests)

    def observe(
        self,
        requests: Sequence[DraftedRequest],
        slots: Int32,
        cycles: Cycles,
        outcomes: VerifyOutcomes,
        chain_accepted: Int32,
    ) -> None:
        """Takes in what the cycles of a batch committed. Row i belongs to requests[i], slots[i].

        chain_accepted: int32[num_requests], accepted tokens of what was verified of each chain; -1
            where nothing was.
        """
        if self._model_predictor is None and self._calibration is None:
            return
        token_ids, lengths = outcomes.token_ids, outcomes.lengths
        of_model = np.where(
            cycles.drafts.num_nodes > 0, outcomes.num_model_accepted, outcomes.num_accepted_drafts
        )
        of_model[cycles.model_sizes == 0] = -1
        # Requests that never verify cache drafts tell nothing of those that do.
        if any(request.without_cache for request in requests):
            told = [row for row, request in enumerate(requests) if not request.without_cache]
            slots, token_ids, lengths = slots[told], token_ids[told], lengths[told]
            cycles, of_model = cycles.select(told), of_model[told]
            chain_accepted = chain_accepted[told]
        if self._model_predictor is not None:
            verified = VerifiedModelDrafts(
                cycles.model_sizes, cycles.model_steps, cycles.model_expected
            )
            self._model_predictor.observe(slots, token_ids, lengths, of_model, verified)
        if self._calibration is not None:
            for change in self._calibration.observe(
                slots,
                token_ids,
                lengths,
                chain_accepted,
                cycles.chain_lens,
                cycles.chain_expected,
            ):
                _log(change)

    def _predict(self, slots: Int32, drafts: DraftBatch, features: DraftFeatures) -> Prediction:
        """The calibrated prediction for the cache drafts."""
        assert self._predictor is not None, "a policy that predicts has a predictor"
        prediction = self._predictor.predict(features)
        if self._calibration is None:
            return prediction
        return self._calibration.correct(slots, drafts, prediction)

    def _heeded(self, prediction: Prediction, drafts: DraftBatch, num_requests: int) -> Float32:
        """The survival by which to allocate: that of the prediction, but the suffix cache's own
        where the predictor is not heeded."""
        assert prediction.acceptance is not None, "use_predictor takes no other"
        survival, in_fallback = prediction.acceptance, self.in_fallback(drafts, num_requests)
        if in_fallback is None:
            return survival
        longest = min(drafts.probs.shape[1], MAX_DRAFT_LEN)
        is_in_draft = np.arange(longest) < drafts.num_nodes[:num_requests, None]
        of_votes = np.where(is_in_draft, drafts.probs[:num_requests, :longest], 0)
        is_off = np.array(in_fallback)
        survival = survival.copy()
        survival[is_off, :longest] = of_votes[is_off]
        return survival


def _log(change: FallbackChange) -> None:
    logger.warning(
        "HVD: cache drafts of origin %s: %.2f tokens predicted, %.2f accepted. %s.",
        change.origin,
        change.mean_predicted,
        change.mean_accepted,
        "The predictor is off and not heeded for them"
        if change.is_fallback
        else "The predictor is right again and decides on them",
    )
