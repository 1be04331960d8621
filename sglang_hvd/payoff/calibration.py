"""Keeps a predictor right while it serves: the workload drifts, the predictor does not.

Everything is kept by origin, where the draft's longest match lies, because a workload that changes
changes them apart. A cycle tells of a verified draft how many tokens were accepted, and of any
other only whether its first token was right: what follows depends on the model drafter. Both are
free of selection, since what was predicted decided which draft was verified.

Equal calls give equal results: every tensor-parallel rank must decide alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.payoff.predictor import Prediction
from sglang_hvd.types import MATCH_FEATURES, DraftBatch, TokenIds

Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]

# By number in the column "origin" of MATCH_FEATURES.
ORIGINS = ("prompt", "output", "shared")

# Bound of the correction, in log odds: a predictor that is further off has to be trained again.
MAX_SHIFT = 1.0

NUM_BINS = 10

_ORIGIN = MATCH_FEATURES.index("origin")

# What a sum keeps of itself with each further draft: the figures are of the last thousand or so.
_KEPT = 0.999

# Steps of the correction, in log odds for each token that differs from what was predicted. With a
# predictor that is right the shift then wanders by some 0.05, and a wrong one is followed within
# one or two thousand verified drafts. The first tokens of the other drafts come in larger numbers
# and say little of how far a good draft goes.
_STEP = 0.005
_FIRST_TOKEN_STEP = 0.001

# Accepted tokens over predicted ones, either way round: the predictor is not heeded from the first
# on, and heeded again below the second. The weights are of verified drafts.
_FALLBACK_RATIO, _FALLBACK_WEIGHT = 2.0, 100.0
_RETURN_RATIO, _RETURN_WEIGHT = 1.5, 400.0


@dataclass(frozen=True, slots=True)
class Reliability:
    """What was predicted of some events and what came of them; None without any.

    weight: number of events, the older ones counting less.
    """

    mean_predicted: float | None
    share: float | None
    weight: float


@dataclass(frozen=True, slots=True)
class OriginFigures:
    """How right the predictions for drafts of one origin are.

    num_verified: verified drafts since the predictor was loaded.
    mean_predicted, mean_accepted: accepted length in tokens of the latest of them, after
        correction; None without any since the fallback changed.
    shift: correction in log odds.
    is_fallback: the predictor is so wrong that the frequency rule decides.
    first_token: that a draft's first token is right, of all drafts.
    bins: that a verified draft is accepted up to the threshold, by predicted probability: ten
        bins of equal width. Empty for a predictor of bare lengths, first_token None.
    """

    num_verified: int
    mean_predicted: float | None
    mean_accepted: float | None
    shift: float
    is_fallback: bool
    first_token: Reliability | None
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
    for requests. Not thread-safe.

    The survival probabilities S of an origin's drafts become sigmoid(logit(S) + shift), and the
    payoff their sum. The shift follows the gradient of the log-loss of what was seen: for a
    verified draft, that more than j tokens are accepted, for each j below its length. The gradient
    of all these together is accepted minus predicted tokens. A predictor of bare lengths is not
    corrected.

    threshold: of the payoff policy, in tokens.
    """

    def __init__(self, threshold: float) -> None:
        self._depth = min(max(1, math.ceil(threshold)), MAX_DRAFT_LEN)
        self._shifts = np.zeros(len(ORIGINS))
        self._is_fallback = np.zeros(len(ORIGINS), np.bool_)
        self._num_verified = np.zeros(len(ORIGINS), np.int64)
        # In the last axis: weight, predicted, what came of it.
        self._verified = np.zeros((len(ORIGINS), 3))
        self._first_tokens = np.zeros((len(ORIGINS), 3))
        self._bins = np.zeros((len(ORIGINS), NUM_BINS, 3))
        self._has_survival = False
        # By slot, what was expected of the cycle under way. draft_len 0: nothing.
        self._draft_lens = np.zeros(0, np.int32)
        self._origins = np.zeros(0, np.intp)
        self._first_ids = np.zeros(0, np.int32)
        self._payoffs = np.zeros(0)
        self._first_probs = np.zeros(0)
        self._reach_probs = np.zeros(0)

    @property
    def has_fallback(self) -> bool:
        """Whether the frequency rule decides for the drafts of any origin."""
        return bool(self._is_fallback.any())

    def is_fallback(self, drafts: DraftBatch, num_drafts: int) -> npt.NDArray[np.bool_]:
        """Whether the frequency rule decides for each draft: bool[num_drafts]."""
        is_fallback: npt.NDArray[np.bool_] = self._is_fallback[_origins(drafts, num_drafts)]
        return is_fallback

    def expect(self, slots: Int32, drafts: DraftBatch, prediction: Prediction) -> Prediction:
        """The prediction corrected. It is kept until the cycle is observed.

        slots: int32[num_requests]; row i of drafts and prediction belongs to slots[i].
        """
        origins = _origins(drafts, len(slots))
        corrected = self._correct(prediction, origins)
        self._reserve(slots)
        self._draft_lens[slots] = np.minimum(drafts.num_nodes[: len(slots)], MAX_DRAFT_LEN)
        self._origins[slots] = origins
        self._first_ids[slots] = drafts.token_ids[: len(slots), 0]
        self._payoffs[slots] = corrected.payoffs
        self._has_survival = corrected.survival is not None
        if corrected.survival is not None:
            self._first_probs[slots] = corrected.survival[:, 0]
            self._reach_probs[slots] = corrected.survival[:, self._depth - 1]
        return corrected

    def observe(
        self,
        slots: Int32,
        token_ids: Sequence[TokenIds | Sequence[int]],
        accepted_lens: Sequence[int | None],
    ) -> list[FallbackChange]:
        """Takes in what the cycles committed; returns the fallbacks that this changed.

        token_ids: committed tokens.
        accepted_lens: accepted tokens of each request's cache draft; None: it was not verified, or
            the request ended inside it.
        """
        self._reserve(slots)
        has_draft = self._draft_lens[slots] > 0
        rows = [row for row, has in enumerate(has_draft.tolist()) if has and len(token_ids[row])]
        if not rows:
            return []
        slots = slots[rows]
        draft_lens = self._draft_lens[slots]
        self._draft_lens[slots] = 0
        origins, payoffs = self._origins[slots], self._payoffs[slots]
        is_right = self._first_ids[slots] == [token_ids[row][0] for row in rows]
        is_verified = np.array([accepted_lens[row] is not None for row in rows])
        accepted = np.minimum([accepted_lens[row] or 0 for row in rows], draft_lens)
        if self._has_survival:
            first_probs = self._first_probs[slots]
            steps = np.where(
                is_verified,
                _STEP * (accepted - payoffs) / draft_lens,
                _FIRST_TOKEN_STEP * (is_right - first_probs),
            )
            self._shifts += np.bincount(origins, steps, len(ORIGINS))
            np.clip(self._shifts, -MAX_SHIFT, MAX_SHIFT, out=self._shifts)
            _add(self._first_tokens, origins, first_probs, is_right)
        if not is_verified.any():
            return []
        origins, accepted = origins[is_verified], accepted[is_verified]
        self._num_verified += np.bincount(origins, minlength=len(ORIGINS))
        _add(self._verified, origins, payoffs[is_verified], accepted)
        if self._has_survival:
            self._add_to_bins(origins, self._reach_probs[slots][is_verified], accepted)
        return self._changes()

    def figures(self) -> dict[str, OriginFigures]:
        """How right the predictions are, by origin."""
        return {origin: self._figures(number) for number, origin in enumerate(ORIGINS)}

    def _correct(self, prediction: Prediction, origins: npt.NDArray[np.intp]) -> Prediction:
        survival = prediction.survival
        if survival is None or not self._shifts.any():
            return prediction
        # sigmoid(logit(S) + shift) without a logarithm; 0 and 1 stay what they are.
        factors = np.array([math.exp(shift) for shift in self._shifts.tolist()])[origins, None]
        before = survival.astype(np.float64)
        after = np.minimum(before * factors / (1 + before * (factors - 1)), 1)
        # A shift of 0 changes no bit.
        payoffs = prediction.payoffs + (after - before).sum(axis=1)
        return Prediction(payoffs.astype(np.float32), after.astype(np.float32))

    def _add_to_bins(self, origins: npt.NDArray[np.intp], probs: Float64, accepted: Int32) -> None:
        self._bins *= _KEPT ** np.bincount(origins, minlength=len(ORIGINS))[:, None, None]
        bins = np.minimum((probs * NUM_BINS).astype(np.intp), NUM_BINS - 1)
        numbers = origins * NUM_BINS + bins
        for column, values in enumerate((np.ones_like(probs), probs, accepted >= self._depth)):
            added = np.bincount(numbers, values, self._bins[:, :, column].size)
            self._bins[:, :, column] += added.reshape(self._bins.shape[:2])

    def _changes(self) -> list[FallbackChange]:
        changes = []
        for number, (weight, predicted, accepted) in enumerate(self._verified.tolist()):
            was_fallback = bool(self._is_fallback[number])
            if weight < (_RETURN_WEIGHT if was_fallback else _FALLBACK_WEIGHT):
                continue
            ratio = _RETURN_RATIO if was_fallback else _FALLBACK_RATIO
            is_right = accepted * ratio >= predicted and accepted <= ratio * predicted
            if is_right == was_fallback:
                self._is_fallback[number] = not was_fallback
                # Another rule chooses from now on: of its drafts the figures shall be.
                self._verified[number] = 0
                changes.append(
                    FallbackChange(
                        ORIGINS[number], not was_fallback, predicted / weight, accepted / weight
                    )
                )
        return changes

    def _figures(self, number: int) -> OriginFigures:
        sums = _reliability(self._verified[number])
        return OriginFigures(
            num_verified=int(self._num_verified[number]),
            mean_predicted=sums.mean_predicted,
            mean_accepted=sums.share,
            shift=float(self._shifts[number]),
            is_fallback=bool(self._is_fallback[number]),
            first_token=_reliability(self._first_tokens[number]) if self._has_survival else None,
            bins=tuple(map(_reliability, self._bins[number])) if self._has_survival else (),
        )

    def _reserve(self, slots: Int32) -> None:
        needed, size = int(slots.max(initial=-1)) + 1, len(self._draft_lens)
        if needed <= size:
            return
        more = (0, max(needed, 2 * size) - size)
        self._draft_lens = np.pad(self._draft_lens, more)
        self._origins = np.pad(self._origins, more)
        self._first_ids = np.pad(self._first_ids, more)
        self._payoffs = np.pad(self._payoffs, more)
        self._first_probs = np.pad(self._first_probs, more)
        self._reach_probs = np.pad(self._reach_probs, more)


def _origins(drafts: DraftBatch, num_drafts: int) -> npt.NDArray[np.intp]:
    has_draft = drafts.num_nodes[:num_drafts] > 0
    return np.where(has_draft, drafts.features[:num_drafts, _ORIGIN], 0).astype(np.intp)


def _add(
    sums: Float64,
    origins: npt.NDArray[np.intp],
    predicted: Float64,
    came: npt.NDArray[np.bool_] | Int32,
) -> None:
    num = np.bincount(origins, minlength=len(ORIGINS))
    sums *= _KEPT ** num[:, None]
    sums[:, 0] += num
    sums[:, 1] += np.bincount(origins, predicted, len(ORIGINS))
    sums[:, 2] += np.bincount(origins, came, len(ORIGINS))


def _reliability(sums: Float64) -> Reliability:
    weight, predicted, came = sums.tolist()
    if weight == 0:
        return Reliability(None, None, 0.0)
    return Reliability(predicted / weight, came / weight, weight)
