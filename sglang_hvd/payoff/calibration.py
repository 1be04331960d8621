"""Corrects a predictor while it serves, since the workload changes and the predictor does not.

Figures are kept per origin of the match, because a change of the workload affects origins
differently. A verified draft shows its accepted length. Any other draft shows only whether its
first token was right, because the later tokens depend on the model drafter. The choice of the
verified draft does not bias the figures: it was made from the prediction itself.

If a predictor is too far off for an origin, the origin is in fallback and its predictions are
ignored. Policy payoff then uses the frequency rule, allocate the suffix cache's own probabilities.

Equal calls give equal results, because all tensor-parallel ranks must decide alike.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd._native import Calibration
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.payoff.predictor import Prediction
from sglang_hvd.types import DraftBatch, MatchOrigin, TokenIds

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

# Names by MatchOrigin.
ORIGINS = tuple(origin.name.lower() for origin in MatchOrigin)


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predicted and observed means over the latest events; None if there are none.

    mean_predicted: mean of the predictions, in probabilities or tokens.
    share: mean of the observations: the share of events that came true, or tokens.
    weight: number of events; older ones count less.
    """

    mean_predicted: float | None
    share: float | None
    weight: float

    @classmethod
    def of_sums(cls, weight: float, predicted: float, observed: float) -> "Reliability":
        """The means from the sums of native/calibration.hpp's RunningReliability."""
        if weight == 0:
            return cls(None, None, 0.0)
        return cls(predicted / weight, observed / weight, weight)


@dataclass(frozen=True, slots=True)
class OriginFigures:
    """How right the predictions for drafts of one origin are.

    num_verified: verified drafts since the predictor was loaded.
    mean_predicted, mean_accepted: accepted length in tokens of the latest verified drafts, as
        predicted after correction and as observed; None if there are none since the fallback
        changed.
    shift: correction in log odds.
    is_fallback: whether the predictions for this origin are ignored.
    first_token: whether a draft's first token is right, over all drafts.
    bins: whether a verified draft is accepted up to the threshold (six tokens if none is set), by
        predicted probability: ten bins of equal width. first_token and bins have no events with a
        predictor of bare lengths.
    """

    num_verified: int
    mean_predicted: float | None
    mean_accepted: float | None
    shift: float
    is_fallback: bool
    first_token: Reliability
    bins: tuple[Reliability, ...]


@dataclass(frozen=True, slots=True)
class FallbackChange:
    """The fallback of an origin was switched on or off, because of these means in tokens."""

    origin: str
    is_fallback: bool
    mean_predicted: float
    mean_accepted: float

    @classmethod
    def of(
        cls, origin: int, is_fallback: bool, mean_predicted: float, mean_accepted: float
    ) -> "FallbackChange":
        """The change that the native calibration tells."""
        return cls(ORIGINS[origin], is_fallback, mean_predicted, mean_accepted)


class OnlineCalibration:
    """Call correct before each cycle and observe after it, with the same slots. Slots are small
    numbers that stand for requests. Not thread-safe. native/calibration.hpp has the rules and
    their constants.

    Each probability p for an origin's drafts becomes sigmoid(logit(p) + shift), and the accepted
    length their sum. The shift follows the difference of accepted and predicted lengths: within
    tens of verified drafts if the predictor is far off, slowly if it is about right. A predictor of
    bare lengths is not corrected.

    threshold: of the bins, in tokens.
    """

    def __init__(self, threshold: float) -> None:
        self.native = Calibration(min(max(1, math.ceil(threshold)), MAX_DRAFT_LEN))

    def correct(self, slots: Int32, drafts: DraftBatch, prediction: Prediction) -> Prediction:
        """Returns the corrected prediction, and keeps it until the cycle is observed.

        slots: int32[num_requests]; row i of drafts and prediction belongs to slots[i].
        """
        accepted_lens, acceptance = prediction.accepted_lens, prediction.acceptance
        if acceptance is not None and self.native.corrects():
            accepted_lens, acceptance = accepted_lens.copy(), acceptance.copy()
        self.native.correct(slots, drafts, accepted_lens, acceptance)
        is_corrected = accepted_lens is not prediction.accepted_lens
        return Prediction(accepted_lens, acceptance) if is_corrected else prediction

    def observe(
        self,
        slots: Int32,
        token_ids: TokenIds,
        lengths: Int32,
        accepted_lens: Int32,
        verified_lens: Int32,
        predicted: Float32,
    ) -> list[FallbackChange]:
        """Learns from the committed tokens of cycles; returns the fallbacks that changed.

        token_ids: int32[num_requests, width]; the first lengths[i] entries of row i were committed.
        verified_lens: int32[num_requests], how many first tokens of each cache draft were verified,
            0 for none.
        accepted_lens: int32[num_requests], how many of these were accepted; unspecified for
            requests without any.
        predicted: float32[num_requests], how many of these were predicted to be accepted. NaN: the
            whole draft was verified, and the prediction that correct returned counts.
        """
        changes = self.native.observe(
            slots, token_ids, lengths, accepted_lens, verified_lens, predicted
        )
        return [FallbackChange.of(*change) for change in changes]

    def figures(self) -> dict[str, OriginFigures]:
        """How right the predictions are, by origin."""
        figures = {}
        for number, origin in enumerate(ORIGINS):
            num_verified, shift, is_fallback, verified, first_tokens, bins = self.native.figures(
                number
            )
            of_verified = Reliability.of_sums(*verified)
            figures[origin] = OriginFigures(
                num_verified=num_verified,
                mean_predicted=of_verified.mean_predicted,
                mean_accepted=of_verified.share,
                shift=shift,
                is_fallback=is_fallback,
                first_token=Reliability.of_sums(*first_tokens),
                bins=tuple(Reliability.of_sums(*sums) for sums in bins),
            )
        return figures
