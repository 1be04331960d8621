"""The draft sources: how the acceptance of each source's drafts is predicted and learned from.

types.SOURCES is the table of the sources. The host knows the drafts of the cache before it
allocates. It does not know those of a drafter on the device, such as the model drafter (see
DraftSource). The DrafterChoices of such a drafter say how much it can draft and what that costs.

A further source that the host knows also needs its drafts in StepCore::predict, which so far joins
the cache's drafts only. Requests are named by slots.
"""

import logging
from collections.abc import Mapping

from sglang_hvd import _native
from sglang_hvd.config import PAPER_THRESHOLD, HvdConfig
from sglang_hvd.payoff import (
    AcceptancePredictor,
    FallbackChange,
    ModelFigures,
    ModelPredictor,
    OnlineCalibration,
    OriginFigures,
)

logger = logging.getLogger(__name__)


class CacheSource:
    """The predictor of the acceptance of cache drafts, and what corrects it. StepCore predicts with
    them before each cycle, and lets them learn after it.

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

    @property
    def calibration(self) -> OnlineCalibration | None:
        """What corrects the predictor; None if nothing does."""
        return self._calibration

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


class ModelSource:
    """The predictor of the acceptance of a device drafter's drafts. StepCore predicts with it
    before each cycle, and lets it learn after it. The model drafter is such a drafter.

    bit: the source's bit in sets of sources.
    """

    def __init__(self, bit: int, predictor: ModelPredictor) -> None:
        self.bit, self.predictor = bit, predictor

    def figures(self) -> ModelFigures:
        """How accurate the predictions are."""
        return self.predictor.figures()

    def for_core(self) -> tuple[_native.ModelPredictor, int, list[int], list[float]]:
        """What StepCore knows of the source."""
        predictor = self.predictor
        return predictor.native, self.bit, predictor.sizes.tolist(), predictor.odds.tolist()

    def start(self, slot: int) -> None:
        """A new request has this slot."""
        self.predictor.start(slot)


def log_change(change: FallbackChange) -> None:
    """Tells the operator that the predictor is ignored from now on, or no longer."""
    logger.warning(
        "HVD: cache drafts of origin %s: %.2f tokens predicted, %.2f accepted. %s.",
        change.origin,
        change.mean_predicted,
        change.mean_accepted,
        "The predictor is wrong and is ignored for them"
        if change.is_fallback
        else "The predictor is right again and decides on them",
    )
