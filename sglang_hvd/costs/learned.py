"""Corrects a table of step costs with the times of the steps that a server runs."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from sglang_hvd.costs.table import Float64, StepCosts

# What an observation keeps of its weight in a moving mean with each further step: the latest few
# hundred steps count.
_KEPT = 0.998

# After so many steps without an observation a shape is as if it had never run.
_FORGET_AFTER = 4000

# Prior weight, in observations: what is more general counts as so many.
_PRIOR = 4.0

# A time counts up to this many times the expected one, and up to this many times _MIN_MS.
_CLIP = 3.0
_MIN_MS = 0.5

# Contexts leave at least this share of the table's time to the verification itself.
_MIN_RATIO = 0.1

# Steps without a step that was launched ahead, after which the time before such steps is unknown.
_FORGET_AHEAD_AFTER = 512

_Shape = tuple[int, int]


class LearnedCosts:
    """observe_* receive times in milliseconds; table is the base, corrected by them.

    Each part of a step has a moving mean of its residuals to the table, by shape: number of
    requests, and width or number of draft steps. The residual of a verification is a ratio, after
    the price of its contexts. That of a draft or draft-extend is the overhead beyond the ratio of
    all verifications: where the device waits for the host, a draft of one step takes as long as one
    of eight. A shape that has n observations is shrunk to the mean of its part by n / (n + 4), and
    that mean likewise to the base. What a step takes in addition to its parts is a mean by number
    of requests.

    The first time of a shape is dropped if it is far above the expected one: a first step may wait
    for kernels to be compiled. Later ones are clipped. Not thread-safe.

    base: the table to correct.
    runs_ahead: steps without drafts may be launched before the tokens of the last step are known.
        Then the time before such a step is part of every step, and what is missing from it before
        the other steps is their wait.
    """

    def __init__(self, base: StepCosts, *, runs_ahead: bool = False) -> None:
        self.num_observed = 0
        self._base = base
        self._runs_ahead = runs_ahead
        self._verify, self._extend, self._draft = _Part(), _Part(), _Part()
        self._rest, self._rest_before_ahead = _Part(), _Part()
        # Milliseconds of a token of context, and the sums of its regression within shapes.
        self._token_ms = (base.context or 0.0) / 1000
        self._square = self._product = 0.0
        self._speed = 1.0  # ratio of verifications with the fewest nodes, as last known
        # What the base says does not change, and every step asks.
        self._verify_ms = cache(lambda num, width: float(base.verify_ms(num, [width])[0]))
        self._extend_ms = cache(lambda num, width: float(base.draft_extend_ms(num, [width])[0]))
        self._draft_ms = cache(lambda num, steps: float(base.draft_ms([num], steps)[0]))

    def observe_verify(
        self, num_requests: int, width: int, milliseconds: float, *, num_context: int = 0
    ) -> None:
        """A step of the target model. num_context: tokens in the KV caches of its requests."""
        self.num_observed += 1
        step, shape = self.num_observed, (num_requests, width)
        expected = self._verify_ms(num_requests, width)
        measured, context = milliseconds / expected, num_context / expected
        mean = self._verify.shapes.get(shape)
        overall = self._ratio()
        ratio = overall if mean is None else mean.shrunk(step, overall, self._token_ms)
        limit = _CLIP * (max(ratio, 1.0) + self._token_ms * context)
        mean = self._verify.mean_of(step, shape, is_outlier=measured > limit)
        if mean is None:
            return
        measured = min(measured, limit)
        # Contexts are compared within a shape only: wide steps may be those of long contexts.
        share = mean.num / (mean.num + 1) * (context - mean.factor)
        self._square = _KEPT * self._square + share * (context - mean.factor)
        self._product = _KEPT * self._product + share * (measured - mean.residual)
        self._verify.add(step, mean, measured, context)

    def observe_extend(self, num_requests: int, width: int, milliseconds: float) -> None:
        """A draft-extend."""
        expected = self._extend_ms(num_requests, width)
        self._observe_overhead(self._extend, (num_requests, width), expected, milliseconds)

    def observe_draft(self, num_requests: int, num_steps: int, milliseconds: float) -> None:
        """A draft of the model drafter."""
        expected = self._draft_ms(num_requests, num_steps)
        self._observe_overhead(self._draft, (num_requests, num_steps), expected, milliseconds)

    def observe_rest(
        self, num_requests: int, milliseconds: float, *, is_before_ahead: bool = False
    ) -> None:
        """What a step took in addition to these parts. is_before_ahead: the next step was launched
        before its tokens were known."""
        assert self._runs_ahead or not is_before_ahead, "steps do not run ahead"
        rest = self._rest_before_ahead if is_before_ahead else self._rest
        step, shape = self.num_observed, (num_requests, 0)
        mean = rest.shapes.get(shape, rest.mean)
        limit = _CLIP * max(mean.shrunk(step, rest.mean.residual), _MIN_MS)
        mean = rest.mean_of(step, shape, is_outlier=milliseconds > limit)
        if mean is not None:
            rest.add(step, mean, min(milliseconds, limit))

    def times(self) -> Float64:
        """The times of the corrected table, float64[num_times], for `table` in any process that has
        the same base."""
        base, step, overall = self._base, self.num_observed, self._verify.mean
        square = self._square + _PRIOR * overall.factor**2
        if square > 0:
            prior = _PRIOR * overall.factor**2 * (base.context or 0.0) / 1000
            self._token_ms = max((self._product + prior) / square, 0.0)
        knots, ratio = (base.batch_sizes, base.widths), self._ratio()
        of_base = np.array(base.verify)
        ratios, weight = self._verify.at(
            step, *knots, self._unseen_ratios(ratio), self._token_ms, scale=of_base
        )
        verify = _capped(np.maximum(ratios, _MIN_RATIO) * of_base, weight)
        extend = self._with_overhead(self._extend, *knots, np.array(base.draft_extend))[0]
        rest, waited = (
            part.at(step, base.batch_sizes, (0,), np.full((len(knots[0]), 1), part.mean.residual))
            for part in (self._rest_before_ahead, self._rest)
        )
        rest, waited = rest[0][:, 0], waited[0][:, 0]
        if not self._runs_ahead:
            rest = waited
        elif step - self._rest_before_ahead.mean.step > _FORGET_AHEAD_AFTER:
            # A stale time would make waits look free: no step would run ahead and correct it.
            rest = np.zeros_like(rest)
        wait = np.maximum(waited - rest, 0.0)
        if not self._rest.shapes and base.wait is not None:
            wait = np.array(base.wait)
        return np.concatenate(
            [
                [1000 * self._token_ms],
                _rising(verify + rest[:, None]).ravel(),
                _rising(extend).ravel(),
                *self._draft_lines(),
                wait,
            ]
        )

    def table(self, times: Float64) -> StepCosts:
        """The base with these times."""
        base, num = self._base, len(self._base.batch_sizes)
        size = num * len(base.widths)
        context, verify, extend, once, per_round, wait = np.split(
            times, np.cumsum([1, size, size, num, num])
        )
        return StepCosts(
            about=f"{base.about}, refined by its steps",
            batch_sizes=base.batch_sizes,
            widths=base.widths,
            verify=tuple(map(tuple, verify.reshape(num, -1).tolist())),
            draft_round=tuple(per_round.tolist()),
            draft_extend=tuple(map(tuple, extend.reshape(num, -1).tolist())),
            draft_once=tuple(once.tolist()),
            context=float(context[0]) if context[0] > 0 else None,
            wait=tuple(wait.tolist()) if wait.any() else None,
        )

    def _ratio(self) -> float:
        """Of all verifications to the table, without contexts."""
        ratio = self._verify.mean.shrunk(self.num_observed, 1.0, self._token_ms)
        return max(ratio, _MIN_RATIO)

    def _unseen_ratios(self, ratio: float) -> Float64:
        """Of verifications that never ran to the table: a line by nodes through those that did, so
        that nodes that are cheaper than the table says are cheaper everywhere.

        ratio: of all verifications.
        """
        base = self._base
        per_ms = np.outer(base.batch_sizes, np.array(base.widths) - 1) / np.array(base.verify)
        found, weights = self._verify.residuals(self.num_observed, self._token_ms)
        if not weights.any():
            return np.full(per_ms.shape, ratio)
        nodes = np.array(
            [n * (width - 1) / self._verify_ms(n, width) for n, width in self._verify.shapes]
        )
        mean_nodes, mean_ratio = (np.average(x, weights=weights) for x in (nodes, found))
        centred = nodes - mean_nodes
        square = weights @ centred**2 + _PRIOR * nodes.max() ** 2
        slope = weights @ (centred * (found - mean_ratio)) / max(square, 1e-9)
        # Beyond the shapes that ran, the line would say anything.
        line = mean_ratio + slope * (np.clip(per_ms, nodes.min(), nodes.max()) - mean_nodes)
        line = ratio * np.maximum(line / max(mean_ratio, _MIN_RATIO), _MIN_RATIO)
        self._speed = float(line[0, 0])
        times = np.array(base.verify)
        return _rising(line * times) / times

    def _observe_overhead(
        self, part: "_Part", shape: _Shape, expected: float, milliseconds: float
    ) -> None:
        step, speed = self.num_observed, self._speed
        mean, overall = (
            part.shapes.get(shape),
            float(part.overhead(step, np.array(expected), speed)),
        )
        overhead = overall if mean is None else mean.shrunk(step, overall, speed)
        limit = _CLIP * max(speed * expected + overhead, expected, _MIN_MS)
        mean = part.mean_of(step, shape, is_outlier=milliseconds > limit)
        if mean is not None:
            part.add(step, mean, min(milliseconds, limit), expected)

    def _with_overhead(
        self, part: "_Part", batch_sizes: Sequence[int], columns: Sequence[int], of_base: Float64
    ) -> tuple[Float64, Float64]:
        """Times and weights of a part: float64[num_batch_sizes, num_columns] each.

        of_base: its times by the base, same shape.
        """
        step, speed = self.num_observed, self._speed
        overall = part.overhead(step, of_base, speed)
        overhead, weight = part.at(step, batch_sizes, columns, overall, speed)
        return _capped(np.maximum(speed * of_base + overhead, 0.0), weight), weight

    def _draft_lines(self) -> tuple[Float64, Float64]:
        """What a draft takes once and in each round, float64[num_batch_sizes] each: the line
        through what drafts in several numbers of steps take."""
        sizes = self._base.batch_sizes
        steps = sorted({1, 2, *(steps for _, steps in self._draft.shapes)})
        of_base = np.array([self._base.draft_ms(sizes, num) for num in steps]).T
        times, weight = self._with_overhead(self._draft, sizes, steps, of_base)
        weight, rounds = weight + 1.0, np.array(steps) - 1.0
        total = weight.sum(axis=1)
        mean_time, mean_rounds = ((weight * x).sum(axis=1) / total for x in (times, rounds))
        centred = rounds - mean_rounds[:, None]
        slope = (weight * centred * times).sum(axis=1) / (weight * centred**2).sum(axis=1)
        # Neither term is negative: the line goes through the mean then.
        slope = np.clip(slope, 0.0, mean_time / mean_rounds)
        once = np.maximum(mean_time - slope * mean_rounds, 0.0)
        once, slope = (
            np.maximum.accumulate(_capped(of_line[:, None], total[:, None])[:, 0])
            for of_line in (once, slope)
        )
        return once, slope


class _Mean:
    """Moving means of residuals, and of what they may be in proportion to.

    factor: tokens of context for each expected millisecond of a verification; expected milliseconds
        of the other parts.
    num: weight of the observations that is left at `step`. num_seen: number of observations.
    """

    __slots__ = ("factor", "num", "num_seen", "residual", "step")

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.num = self.num_seen = self.residual = self.factor = 0.0

    def add(self, step: int, residual: float, factor: float) -> None:
        self.num_seen = self.weight(step) + 1
        self.num = self.num * _KEPT ** (step - self.step) + 1
        self.step = step
        self.residual += (residual - self.residual) / self.num
        self.factor += (factor - self.factor) / self.num

    def weight(self, step: int) -> float:
        """In observations: rare ones count in full until they are forgotten."""
        return self.num_seen if step - self.step <= _FORGET_AFTER else 0.0

    def shrunk(self, step: int, prior: float, of_factor: float = 0.0) -> float:
        """The residual after so much for the factor."""
        weight = self.weight(step)
        value = self.residual - of_factor * self.factor
        return (weight * value + _PRIOR * prior) / (weight + _PRIOR)


class _Part:
    """The residuals of one part of a step: by shape, and of all shapes."""

    def __init__(self) -> None:
        self.mean = _Mean()
        self.shapes: dict[_Shape, _Mean] = {}

    def mean_of(self, step: int, shape: _Shape, *, is_outlier: bool) -> _Mean | None:
        """The mean that a time of this shape adds to; None if it is the first and an outlier."""
        mean = self.shapes.get(shape)
        if mean is not None and step - mean.step <= _FORGET_AFTER:
            return mean
        mean = self.shapes[shape] = _Mean(step)
        return None if is_outlier else mean

    def add(self, step: int, mean: _Mean, residual: float, factor: float = 0.0) -> None:
        self.mean.add(step, residual, factor)
        mean.add(step, residual, factor)

    def residuals(self, step: int, of_factor: float = 0.0) -> tuple[Float64, Float64]:
        """Of each shape, and the weight of what they are learned from: float64[num_shapes] each."""
        means = self.shapes.values()
        found = np.array([mean.residual - of_factor * mean.factor for mean in means])
        return found, np.array([mean.weight(step) for mean in means])

    def overhead(self, step: int, of_base: Float64, speed: float) -> Float64:
        """What shapes that never ran are expected to take beyond the base at that speed: as much as
        those that did, or in proportion, whichever is less, since what seems expensive is never
        tried."""
        share = np.minimum((of_base + 1e-9) / (self.mean.factor + 1e-9), 1.0)
        return self.mean.shrunk(step, 0.0, speed) * share

    def at(
        self,
        step: int,
        batch_sizes: Sequence[int],
        columns: Sequence[int],
        prior: Float64,
        of_factor: float = 0.0,
        *,
        scale: Float64 | None = None,
    ) -> tuple[Float64, Float64]:
        """Residuals at the entries of a table, and the weight of what they are learned from:
        float64[num_batch_sizes, num_columns] each. Shapes between entries are on the lines between
        them, so this is a least-squares fit that has the shrinkage as its ridge.

        prior: same shape, of entries that never ran.
        scale: same shape, of what residuals are a ratio of; None: they are milliseconds.
        """
        if not self.shapes:
            return prior, np.zeros(prior.shape)
        rows, places = np.array(list(self.shapes)).T
        shares = _shares(rows, batch_sizes)[:, :, None] * _shares(places, columns)[:, None, :]
        shares = shares.reshape(len(rows), -1)
        counts = shares.copy()
        if scale is not None:
            shares = shares * scale.ravel()
            shares /= shares.sum(axis=1, keepdims=True)
        found, weights = self.residuals(step, of_factor)
        beyond = found - shares @ prior.ravel()
        gram = (shares.T * weights) @ shares + _PRIOR * np.eye(prior.size)
        fitted = np.linalg.solve(gram, shares.T @ (weights * beyond)).reshape(prior.shape)
        return prior + fitted, (weights @ counts).reshape(prior.shape)


def _shares(places: Float64, knots: Sequence[int]) -> Float64:
    """What each knot counts for at each place: float64[num_places, num_knots]. Beyond the last knot
    it is that one alone."""
    return np.array([np.interp(places, knots, row) for row in np.eye(len(knots))]).T


def _capped(times: Float64, weights: Float64) -> Float64:
    """Limits each entry to those of at least as many requests and nodes that have more weight: an
    entry that was timed on a disturbed machine must not make all larger ones as expensive."""
    rows, columns = (place.ravel() for place in np.indices(times.shape))
    is_larger = (rows >= rows[:, None]) & (columns >= columns[:, None])
    has_more = weights.ravel() >= weights.ravel()[:, None]
    caps = np.where(is_larger & has_more, times.ravel(), np.inf).min(axis=1)
    return np.minimum(times, caps.reshape(times.shape))


def _rising(times: Float64) -> Float64:
    return np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)
