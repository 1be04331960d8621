"""Keeps a predictor right while it serves: the workload drifts, the predictor does not.

Figures are kept per origin of the match, since workload changes affect origins differently. A
verified draft shows its accepted length; any other shows only whether its first token was right,
because later tokens depend on the model drafter. Neither is biased by which draft was verified:
that was decided from the prediction itself.

Where a predictor is too wrong for an origin it is in fallback: the predictor is not heeded for this
origin; payoff falls back to the frequency rule, allocate to the suffix cache's own probabilities.

Equal calls give equal results: every tensor-parallel rank must decide alike.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.payoff._native import Calibration
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.payoff.predictor import Prediction
from sglang_hvd.payoff.reliability import Reliability
from sglang_hvd.types import MATCH_COLUMNS, DraftBatch, MatchOrigin, TokenIds

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

# Names by MatchOrigin.
ORIGINS = tuple(origin.name.lower() for origin in MatchOrigin)

_ORIGIN = MATCH_COLUMNS.index("origin")


@dataclass(frozen=True, slots=True)
class OriginFigures:
    """How right the predictions for drafts of one origin are.

    num_verified: verified drafts since the predictor was loaded.
    mean_predicted, mean_accepted: accepted length in tokens of the latest of them, after
        correction; None without any since the fallback changed.
    shift: correction in log odds.
    is_fallback: the predictor is so wrong that it is not heeded for this origin.
    first_token: whether a draft's first token is right, over all drafts.
    bins: whether a verified draft is accepted up to the threshold (six tokens where there is none),
        by predicted probability: ten bins of equal width. first_token and bins have no events with
        a predictor of bare lengths.
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
    """The fallback of an origin went on or off, because of these means in tokens."""

    origin: str
    is_fallback: bool
    mean_predicted: float
    mean_accepted: float


class OnlineCalibration:
    """expect before each cycle, observe after it, with the same slots: small numbers that stand
    for requests. Not thread-safe. The rules, and their constants: native/calibration.hpp.

    The survival probabilities S of an origin's drafts become sigmoid(logit(S) + shift), and the
    payoff their sum. The shift follows what was accepted beyond what was predicted: where the
    predictor is far off within some tens of verified drafts, where it is about right slowly. A
    predictor of bare lengths is not corrected.

    threshold: in tokens, of the bins.
    """

    def __init__(self, threshold: float) -> None:
        self._native = Calibration(min(max(1, math.ceil(threshold)), MAX_DRAFT_LEN))

    @property
    def has_fallback(self) -> bool:
        """Whether the predictor is not heeded for some origin."""
        return any(self._native.are_fallback())

    def is_fallback(self, drafts: DraftBatch, num_drafts: int) -> list[bool]:
        """Whether the predictor is not heeded for the origin of each of the first drafts."""
        are_fallback = np.array(self._native.are_fallback())
        has_draft = drafts.num_nodes[:num_drafts] > 0
        origins = np.where(has_draft, drafts.matches[:num_drafts, _ORIGIN], 0).astype(np.intp)
        of_drafts: list[bool] = are_fallback[origins].tolist()
        return of_drafts

    def expect(self, slots: Int32, drafts: DraftBatch, prediction: Prediction) -> Prediction:
        """The prediction corrected. It is kept until the cycle is observed.

        slots: int32[num_requests]; row i of drafts and prediction belongs to slots[i].
        """
        payoffs, survival = prediction.payoffs, prediction.survival
        if survival is not None and self._native.corrects():
            payoffs, survival = payoffs.copy(), survival.copy()
        self._native.expect(
            slots, drafts.token_ids, drafts.num_nodes, drafts.matches, payoffs, survival
        )
        is_corrected = payoffs is not prediction.payoffs
        return Prediction(payoffs, survival) if is_corrected else prediction

    def observe(
        self,
        slots: Int32,
        token_ids: TokenIds,
        lengths: Int32,
        accepted_lens: Int32,
        verified_lens: Int32,
        expected: Float32,
    ) -> list[FallbackChange]:
        """Takes in what the cycles committed; returns the fallbacks that this changed.

        token_ids: int32[num_requests, width]; the first lengths[i] entries of row i were committed.
        verified_lens: int32[num_requests], first tokens of each cache draft that were verified, 0
            for none. accepted_lens: of those, the accepted ones; unspecified where there are none.
        expected: float32[num_requests], accepted tokens that were expected of these; not a number:
            the whole draft's, as expect returned them.
        """
        changes = self._native.observe(
            slots, token_ids, lengths, accepted_lens, verified_lens, expected
        )
        return [
            FallbackChange(ORIGINS[origin], is_fallback, predicted, accepted)
            for origin, is_fallback, predicted, accepted in changes
        ]

    def figures(self) -> dict[str, OriginFigures]:
        """How right the predictions are, by origin."""
        figures = {}
        for number, origin in enumerate(ORIGINS):
            num_verified, shift, is_fallback, verified, first_tokens, bins = self._native.figures(
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
