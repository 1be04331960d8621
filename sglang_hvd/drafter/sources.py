"""The draft sources: how the acceptance of each source's drafts is predicted and learned from.

types.SOURCES is the table of the sources. The host knows the drafts of the cache before it
allocates. It does not know those of a drafter on the device, such as the model drafter (see
DraftSource). The DrafterChoices of such a drafter say how much it can draft and what that costs.

A further source that the host knows also needs HostTrees.add in Proposer._predict, which so far
joins the cache's drafts only. Requests are named by slots.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sglang_hvd.config import PAPER_THRESHOLD, HvdConfig
from sglang_hvd.payoff import (
    AcceptancePredictor,
    DraftFeatures,
    FallbackChange,
    ModelAcceptance,
    ModelFigures,
    ModelPredictor,
    OnlineCalibration,
    OriginFigures,
    Prediction,
    VerifiedModelDrafts,
)
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.types import DraftBatch, DraftPlans, VerifyOutcomes

logger = logging.getLogger(__name__)

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


class CacheSource:
    """Predicts the acceptance of cache drafts before each cycle and observes it after the cycle.

    predictor: None for a policy that predicts nothing.
    """

    def __init__(self, config: HvdConfig, predictor: AcceptancePredictor | None) -> None:
        self._config = config
        self._predictor: AcceptancePredictor | None = None
        self._calibration: OnlineCalibration | None = None
        if predictor is not None:
            self.use_predictor(predictor)

    @property
    def predictor(self) -> AcceptancePredictor | None:
        """The predictor in use."""
        return self._predictor

    def use_predictor(self, predictor: AcceptancePredictor) -> None:
        """Predicts with this one from now on, and calibrates it from the start."""
        if self._config.policy == "allocate":
            assert predictor.kind == "survival", "of_config refuses others"
        self._predictor = predictor
        if self._config.calibrate:
            threshold = self._config.threshold
            self._calibration = OnlineCalibration(
                PAPER_THRESHOLD if threshold is None else threshold
            )

    def figures(self) -> Mapping[str, OriginFigures] | None:
        """How accurate the predictor is, by origin of the draft; None if it is not calibrated."""
        return None if self._calibration is None else self._calibration.figures()

    def predict(self, slots: Int32, drafts: DraftBatch, features: DraftFeatures) -> Prediction:
        """The calibrated prediction for the cache drafts. Row i of drafts and features belongs to
        slots[i]."""
        assert self._predictor is not None, "a policy that predicts has a predictor"
        prediction = self._predictor.predict(features)
        if self._calibration is None:
            return prediction
        return self._calibration.correct(slots, drafts, prediction)

    def acceptance(self, prediction: Prediction, drafts: DraftBatch, num_requests: int) -> Float32:
        """The probability that more than j tokens of each draft are accepted, for the allocator:
        float32[num_requests, MAX_DRAFT_LEN]. The prediction's, or the suffix cache's own while the
        predictor is in fallback."""
        assert prediction.acceptance is not None, "use_predictor takes no other"
        acceptance, in_fallback = prediction.acceptance, self.in_fallback(drafts, num_requests)
        if in_fallback is None:
            return acceptance
        longest = min(drafts.probs.shape[1], MAX_DRAFT_LEN)
        is_in_draft = np.arange(longest) < drafts.num_nodes[:num_requests, None]
        of_votes = np.where(is_in_draft, drafts.probs[:num_requests, :longest], 0)
        is_off = np.array(in_fallback)
        acceptance = acceptance.copy()
        acceptance[is_off, :longest] = of_votes[is_off]
        return acceptance

    def in_fallback(self, drafts: DraftBatch, num_requests: int) -> list[bool] | None:
        """Whether the predictor is so wrong that it is ignored, for each cache draft; None if it
        is used for all."""
        if self._calibration is None or not self._calibration.has_fallback:
            return None
        return self._calibration.is_fallback(drafts, num_requests)

    def observe(
        self, slots: Int32, plans: DraftPlans, outcomes: VerifyOutcomes, chain_accepted: Int32
    ) -> None:
        """Learns from the cycles of a batch. Row i belongs to slots[i].

        chain_accepted: int32[num_requests], accepted tokens of the verified part of each chain; -1
            if nothing of it was verified.
        """
        if self._calibration is None:
            return
        for change in self._calibration.observe(
            slots,
            outcomes.token_ids,
            outcomes.lengths,
            chain_accepted,
            plans.chain_lens,
            plans.chain_predicted,
        ):
            _log(change)


class ModelSource:
    """Predicts the acceptance of a device drafter's drafts before each cycle and observes it after
    the cycle. The model drafter is such a drafter.

    bit: the source's bit in sets of sources.
    """

    def __init__(self, bit: int, predictor: ModelPredictor) -> None:
        self.bit, self._predictor = bit, predictor

    def figures(self) -> ModelFigures:
        """How accurate the predictions are."""
        return self._predictor.figures()

    def start(self, slot: int) -> None:
        """A new request has this slot."""
        self._predictor.start(slot)

    def predict_lens(self, slots: Int32, drafts: DraftBatch, acceptance: Float32 | None) -> Float32:
        """Predicted accepted length of each request's draft in tokens: float32[num_requests].

        drafts, acceptance: of the cache; acceptance is None if it is not known.
        """
        return self._predictor.predict(slots, drafts, acceptance)

    def predict_sizes(
        self, slots: Int32, drafts: DraftBatch, acceptance: Float32 | None
    ) -> ModelAcceptance:
        """The acceptance of each request's draft, by its size. Takes what predict_lens takes."""
        return self._predictor.predict_sizes(slots, drafts, acceptance)

    def observe(self, slots: Int32, plans: DraftPlans, outcomes: VerifyOutcomes) -> None:
        """Learns from the cycles of a batch. Row i belongs to slots[i]."""
        accepted = np.where(
            plans.drafts.num_nodes > 0, outcomes.num_model_accepted, outcomes.num_accepted_drafts
        )
        accepted[plans.num_model_nodes == 0] = -1
        if plans.drafter != self.bit:
            accepted[:] = -1
        verified = VerifiedModelDrafts(plans.model_sizes, plans.model_steps, plans.model_predicted)
        self._predictor.observe(slots, outcomes.token_ids, outcomes.lengths, accepted, verified)


def joined(parts: Sequence[ModelAcceptance]) -> ModelAcceptance:
    """The acceptance of several drafters' drafts, the sizes of one drafter after the other."""
    if len(parts) == 1:
        return parts[0]
    num_steps = max(part.of_all.shape[2] for part in parts)

    def padded(probs: Float32) -> Float32:
        return np.pad(probs, ((0, 0), (0, 0), (0, num_steps - probs.shape[2])))

    return ModelAcceptance(
        np.concatenate([padded(part.of_all) for part in parts], axis=1),
        np.concatenate([padded(part.if_cache_right) for part in parts], axis=1),
    )


def _log(change: FallbackChange) -> None:
    logger.warning(
        "HVD: cache drafts of origin %s: %.2f tokens predicted, %.2f accepted. %s.",
        change.origin,
        change.mean_predicted,
        change.mean_accepted,
        "The predictor is wrong and is ignored for them"
        if change.is_fallback
        else "The predictor is right again and decides on them",
    )
