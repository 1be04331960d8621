"""The rules of native/calibration.hpp in Python, for one origin."""

import math
from dataclasses import dataclass, field

MAX_SHIFT, NUM_BINS, MAX_DRAFT_LEN = 1.0, 10, 64
FIRST_VARIANCE, DRIFT = 0.25, 5e-6
SCATTER, MIN_SCATTER, FIRST_TOKEN_SCATTER = 3.0, 0.5, 10.0
FALLBACK_RATIO, FALLBACK_WEIGHT, FALLBACK_DEVIATIONS = 2.0, 100.0, 3.0
RETURN_RATIO, RETURN_WEIGHT = 1.5, 400.0
TRIAL_AFTER, MAX_TRIAL_AFTER, MAX_TRIAL_DRAFTS = 10_000, 10_240_000, 100_000
KEPT = 0.999


@dataclass
class Sums:
    weight: float = 0.0
    predicted: float = 0.0
    observed: float = 0.0

    def observe(self, predicted: float, observed: float) -> None:
        self.weight = self.weight * KEPT + 1
        self.predicted = self.predicted * KEPT + predicted
        self.observed = self.observed * KEPT + observed

    @property
    def means(self) -> tuple[float | None, float | None, float]:
        if self.weight == 0:
            return None, None, 0.0
        return self.predicted / self.weight, self.observed / self.weight, self.weight

    @property
    def is_far_off(self) -> bool:
        """Whether the difference is beyond chance."""
        left = 1 - self.weight * (1 - KEPT)
        squared_weight = (1 - left * left) / (1 - KEPT * KEPT)
        mean = self.predicted / self.weight
        variance = squared_weight * (SCATTER * mean * (1 + mean) + MIN_SCATTER)
        return abs(self.observed - self.predicted) > FALLBACK_DEVIATIONS * math.sqrt(variance)


@dataclass
class Origin:
    num_verified: int = 0
    num_in_fallback: int = 0
    trial_after: int = TRIAL_AFTER
    num_on_trial: int = 0
    is_on_trial: bool = False
    shift: float = 0.0
    variance: float = FIRST_VARIANCE
    is_fallback: bool = False
    verified: Sums = field(default_factory=Sums)
    first_tokens: Sums = field(default_factory=Sums)
    bins: list[Sums] = field(default_factory=lambda: [Sums() for _ in range(NUM_BINS)])

    def observe(
        self,
        *,
        first_prob: float,
        threshold_prob: float,
        draft_len: int,
        depth: int,
        is_first_right: bool,
        verified: tuple[int, int, float] | None,
    ) -> tuple[bool, float, float] | None:
        """verified: accepted tokens, verified tokens, predicted tokens; None: not verified.

        Returns whether the fallback is on, and mean predicted and accepted tokens, if it changed.
        """
        self.num_in_fallback += self.is_fallback
        if self.is_on_trial and not self.is_fallback:
            self.num_on_trial += 1
            if self.num_on_trial > MAX_TRIAL_DRAFTS:
                self.trial_after, self.is_on_trial = TRIAL_AFTER, False
        self.first_tokens.observe(first_prob, is_first_right)
        if verified is None:
            change = first_prob * (1 - first_prob)
            self._update_shift(is_first_right - first_prob, change, FIRST_TOKEN_SCATTER * change)
        else:
            accepted, num_tokens, mean = verified
            self.num_verified += 1
            self.verified.observe(mean, accepted)
            if num_tokens >= min(depth, draft_len):
                self.bins[min(int(threshold_prob * NUM_BINS), NUM_BINS - 1)].observe(
                    threshold_prob, accepted >= depth
                )
            scatter = mean * (1 + mean) * max(1 - mean / min(num_tokens, MAX_DRAFT_LEN), 0.0)
            self._update_shift(
                accepted - mean, scatter / (1 + 2 * mean), SCATTER * scatter + MIN_SCATTER
            )
        if self.num_in_fallback >= self.trial_after:
            self.is_on_trial, self.num_on_trial = True, 0
            return self._switch()
        return None if verified is None else self._judge()

    def _judge(self) -> tuple[bool, float, float] | None:
        if self.verified.weight < (RETURN_WEIGHT if self.is_fallback else FALLBACK_WEIGHT):
            return None
        self.num_in_fallback = 0
        ratio = RETURN_RATIO if self.is_fallback else FALLBACK_RATIO
        observed, predicted = self.verified.observed, self.verified.predicted
        is_right = predicted <= ratio * observed and observed <= ratio * predicted
        if is_right:
            self.trial_after, self.is_on_trial = TRIAL_AFTER, False
        if is_right == self.is_fallback and (self.is_fallback or self.verified.is_far_off):
            if self.is_on_trial:
                self.trial_after = min(2 * self.trial_after, MAX_TRIAL_AFTER)
            self.is_on_trial = False
            return self._switch()
        return None

    def _switch(self) -> tuple[bool, float, float]:
        sums, self.verified = self.verified, Sums()
        self.is_fallback = not self.is_fallback
        self.num_in_fallback = 0
        weight = max(sums.weight, 1.0)
        return self.is_fallback, sums.predicted / weight, sums.observed / weight

    def _update_shift(self, error: float, change: float, scatter: float) -> None:
        self.variance += DRIFT
        spread = change * change * self.variance + scatter
        if spread <= 0:
            return
        gain = self.variance * change / spread
        self.variance *= 1 - gain * change
        self.shift = min(max(self.shift + gain * error, -MAX_SHIFT), MAX_SHIFT)
