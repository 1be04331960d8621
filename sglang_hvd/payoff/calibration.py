"""Keeps a predictor right while it serves: the workload drifts, the predictor does not.

Everything is kept by origin, where the draft's longest match lies, because a workload that changes
changes them apart. A cycle tells of a verified draft how many tokens were accepted, and of any
other only whether its first token was right: what follows depends on the model drafter. Both are
free of selection, since what was predicted decided which draft was verified.

Equal calls give equal results: every tensor-parallel rank must decide alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hvd.payoff._native import CacheExpectations
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.payoff.predictor import Prediction
from sglang_hvd.payoff.reliability import Reliability, RunningReliability
from sglang_hvd.types import MATCH_FEATURES, DraftBatch, TokenIds

Int32 = npt.NDArray[np.int32]

# By number in the column "origin" of MATCH_FEATURES.
ORIGINS = ("prompt", "output", "shared")

# Bound of the correction, in log odds: a predictor that is further off has to be trained again.
MAX_SHIFT = 1.0

NUM_BINS = 10

_ORIGIN = MATCH_FEATURES.index("origin")

# The shift is tracked as a Kalman filter does: what a predictor may be off by before anything was
# seen, and by how much that may change from one draft to the next, as variances in log odds.
_FIRST_VARIANCE, _DRIFT = 0.25, 5e-6
# Accepted lengths scatter more than the geometric distribution that the filter takes them for, and
# the first tokens of drafts that were not verified, which come in larger numbers, say little of
# how far a good draft goes.
_SCATTER, _LEAST_SCATTER = 3.0, 0.5
_FIRST_TOKEN_SCATTER = 10.0

# Accepted tokens over predicted ones, either way round: the predictor is not heeded from the first
# on, if chance would hardly bring that (in standard deviations), and heeded again below the second.
# The weights are of verified drafts.
_FALLBACK_RATIO, _FALLBACK_WEIGHT, _FALLBACK_DEVIATIONS = 2.0, 100.0, 3.0
_RETURN_RATIO, _RETURN_WEIGHT = 1.5, 400.0

# Drafts seen after which a predictor that is not heeded is put to the test again if too few of them
# were verified to tell: the frequency rule may verify hardly any.
_TRIAL_AFTER = 10_000


@dataclass(frozen=True, slots=True)
class OriginFigures:
    """How right the predictions for drafts of one origin are.

    num_verified: verified drafts since the predictor was loaded.
    mean_predicted, mean_accepted: accepted length in tokens of the latest of them, after
        correction; None without any since the fallback changed.
    shift: correction in log odds.
    is_fallback: the predictor is so wrong that the frequency rule decides.
    first_token: that a draft's first token is right, of all drafts.
    bins: that a verified draft is accepted up to the threshold (six tokens where there is none), by
        predicted probability: ten bins of equal width. Neither knows events with a predictor of
        bare lengths.
    """

    num_verified: int
    mean_predicted: float | None
    mean_accepted: float | None
    shift: float
    is_fallback: bool
    first_token: Reliability
    bins: tuple[Reliability, ...]


@dataclass(frozen=True, slots=True)
class VerifiedCacheDraft:
    """What was verified of a cache draft, its first num_tokens tokens, and what was accepted.

    expected: accepted tokens that were expected of these.
    """

    num_accepted: int
    num_tokens: int
    expected: float


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
    payoff their sum. The shift follows what was accepted beyond what was predicted: where the
    predictor is far off within some tens of verified drafts, where it is about right slowly. A
    predictor of bare lengths is not corrected.

    threshold: in tokens, of the bins.
    """

    def __init__(self, threshold: float) -> None:
        self._depth = min(max(1, math.ceil(threshold)), MAX_DRAFT_LEN)
        self._states = [_State() for _ in ORIGINS]
        self._expected = CacheExpectations()

    @property
    def has_fallback(self) -> bool:
        """Whether the frequency rule decides for the drafts of any origin."""
        return any(state.is_fallback for state in self._states)

    def is_fallback(self, drafts: DraftBatch, num_drafts: int) -> list[bool]:
        """Whether the frequency rule decides for each of the first drafts."""
        return [self._states[n].is_fallback for n in _origins(drafts, num_drafts).tolist()]

    def expect(self, slots: Int32, drafts: DraftBatch, prediction: Prediction) -> Prediction:
        """The prediction corrected. It is kept until the cycle is observed.

        slots: int32[num_requests]; row i of drafts and prediction belongs to slots[i].
        """
        factors = [math.exp(state.shift) for state in self._states]
        payoffs, survival = prediction.payoffs, prediction.survival
        if survival is not None and any(factor != 1 for factor in factors):
            payoffs, survival = payoffs.copy(), survival.copy()
        self._expected.expect(
            slots,
            drafts.token_ids,
            drafts.num_nodes,
            drafts.features,
            np.array(factors),
            self._depth,
            payoffs,
            survival,
        )
        is_corrected = payoffs is not prediction.payoffs
        return Prediction(payoffs, survival) if is_corrected else prediction

    def observe(
        self,
        slots: Int32,
        token_ids: Sequence[TokenIds | Sequence[int]],
        verified: Sequence[VerifiedCacheDraft | int | None],
    ) -> list[FallbackChange]:
        """Takes in what the cycles committed; returns the fallbacks that this changed.

        token_ids: committed tokens.
        verified: of each request's cache draft; a number: so many tokens were accepted of the whole
            of it; None: it was not verified.
        """
        changes = []
        for slot, committed, draft in zip(slots.tolist(), token_ids, verified, strict=True):
            expected = _Expected(*self._expected.take(slot))
            if expected.draft_len == 0 or not len(committed):
                continue
            state = self._states[expected.origin]
            is_verified = draft is not None
            state.see_first_token(expected, int(committed[0]), is_verified=is_verified)
            if draft is not None:
                if isinstance(draft, int):
                    draft = VerifiedCacheDraft(draft, expected.draft_len, expected.payoff)
                state.see_verified(expected, draft, self._depth)
            change = state.change_fallback(ORIGINS[expected.origin], is_verified=is_verified)
            if change is not None:
                changes.append(change)
        return changes

    def figures(self) -> dict[str, OriginFigures]:
        """How right the predictions are, by origin."""
        return {
            origin: state.figures() for origin, state in zip(ORIGINS, self._states, strict=True)
        }


class _Expected(NamedTuple):
    """What is expected of a draft; draft_len 0 without one. The probabilities, that the first token
    and that the threshold's is accepted, are NaN from a predictor of bare lengths."""

    draft_len: int
    origin: int
    first_id: int
    payoff: float
    first_prob: float
    reach_prob: float


@dataclass(slots=True)
class _State:
    """What is known of one origin."""

    num_verified: int = 0
    num_in_fallback: int = 0  # drafts seen since it began or was last judged
    shift: float = 0.0
    variance: float = _FIRST_VARIANCE  # of the shift
    is_fallback: bool = False
    verified: RunningReliability = field(default_factory=RunningReliability)
    first_tokens: RunningReliability = field(default_factory=RunningReliability)
    bins: list[RunningReliability] = field(
        default_factory=lambda: [RunningReliability() for _ in range(NUM_BINS)]
    )

    def see_first_token(self, expected: _Expected, first_id: int, *, is_verified: bool) -> None:
        self.num_in_fallback += self.is_fallback
        if math.isnan(expected.first_prob):
            return
        is_right = first_id == expected.first_id
        self.first_tokens.add(expected.first_prob, is_right)
        if not is_verified:
            change = expected.first_prob * (1 - expected.first_prob)
            self._track(is_right - expected.first_prob, change, _FIRST_TOKEN_SCATTER * change)

    def see_verified(self, expected: _Expected, draft: VerifiedCacheDraft, depth: int) -> None:
        """depth: tokens of the threshold."""
        num_accepted = min(draft.num_accepted, MAX_DRAFT_LEN)
        self.num_verified += 1
        self.verified.add(draft.expected, num_accepted)
        if math.isnan(expected.reach_prob):
            return
        # A draft that was cut short of the threshold does not tell whether it would have got there.
        if draft.num_tokens >= min(depth, expected.draft_len):
            number = min(int(expected.reach_prob * NUM_BINS), NUM_BINS - 1)
            self.bins[number].add(expected.reach_prob, num_accepted >= depth)
        # Of a geometric distribution with this mean, as far as the draft lets it go.
        mean, num_tokens = draft.expected, min(draft.num_tokens, MAX_DRAFT_LEN)
        scatter = mean * (1 + mean) * max(1 - mean / num_tokens, 0.0)
        change = scatter / (1 + 2 * mean)
        self._track(num_accepted - mean, change, _SCATTER * scatter + _LEAST_SCATTER)

    def change_fallback(self, origin: str, *, is_verified: bool) -> FallbackChange | None:
        sums = self.verified
        if self.num_in_fallback >= _TRIAL_AFTER:
            return self._turn_fallback(origin)
        weight = _RETURN_WEIGHT if self.is_fallback else _FALLBACK_WEIGHT
        if not is_verified or sums.weight < weight:
            return None
        self.num_in_fallback = 0
        ratio = _RETURN_RATIO if self.is_fallback else _FALLBACK_RATIO
        is_right = sums.predicted <= ratio * sums.came and sums.came <= ratio * sums.predicted
        if is_right != self.is_fallback:
            return None
        if not self.is_fallback and not _is_beyond_chance(sums):
            return None
        return self._turn_fallback(origin)

    def _turn_fallback(self, origin: str) -> FallbackChange:
        sums = self.verified
        self.is_fallback = not self.is_fallback
        self.num_in_fallback = 0
        # Another rule chooses from now on: of its drafts the figures shall be.
        self.verified = RunningReliability()
        weight = max(sums.weight, 1.0)
        return FallbackChange(origin, self.is_fallback, sums.predicted / weight, sums.came / weight)

    def figures(self) -> OriginFigures:
        verified = self.verified.means()
        return OriginFigures(
            num_verified=self.num_verified,
            mean_predicted=verified.mean_predicted,
            mean_accepted=verified.share,
            shift=self.shift,
            is_fallback=self.is_fallback,
            first_token=self.first_tokens.means(),
            bins=tuple(sums.means() for sums in self.bins),
        )

    def _track(self, error: float, change: float, scatter: float) -> None:
        """A Kalman filter's step.

        error: what was seen, less what was predicted.
        change: of what is predicted, with the shift. scatter: variance of what is seen.
        """
        self.variance += _DRIFT
        spread = change * change * self.variance + scatter
        if spread <= 0:  # nothing could have come otherwise
            return
        gain = self.variance * change / spread
        self.variance *= 1 - gain * change
        self.shift = min(max(self.shift + gain * error, -MAX_SHIFT), MAX_SHIFT)


def _is_beyond_chance(sums: RunningReliability) -> bool:
    """Whether what came of verified drafts is further from what was predicted than it scatters."""
    mean = sums.predicted / sums.weight
    variance = sums.squared_weight * (_SCATTER * mean * (1 + mean) + _LEAST_SCATTER)
    return abs(sums.came - sums.predicted) > _FALLBACK_DEVIATIONS * math.sqrt(variance)


def _origins(drafts: DraftBatch, num_drafts: int) -> npt.NDArray[np.intp]:
    has_draft = drafts.num_nodes[:num_drafts] > 0
    return np.where(has_draft, drafts.features[:num_drafts, _ORIGIN], 0).astype(np.intp)
