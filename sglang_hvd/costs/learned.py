"""Corrects a table of step costs with the times of the steps that a server runs."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from sglang_hvd.costs.table import Float64, StepCosts, capped, rising, shares_of

_KEPT = 0.998  # of an observation's weight in a moving mean, with each further step
_FORGET_AFTER = 4000  # steps without an observation, after which a shape counts as never run
_PRIOR = 4.0  # weight of a prior, in observations
_CLIP = 3.0  # a time is clipped to this multiple of the expected one,
_MIN_MS = 0.5  # which counts as at least this
_MIN_RATIO = 0.1  # min ratio to the base of a verification without its contexts
_FORGET_AHEAD_AFTER = 512  # steps after which the rest before a step that runs ahead is stale

_Shape = tuple[int, int]
_BaseMs = Callable[[int, int], float]


class LearnedCosts:
    """Learns what steps cost: observe_* receive times in milliseconds, table() is the base table
    corrected by them.

    Each part of a step keeps a moving mean for each shape: the number of requests, and the width or
    the number of draft steps. n observations weigh n / (n + 4) in the mean of a shape. The rest is
    the estimate for shapes that never ran, which is shrunk to the base in the same way.

    - A verification is learned as a ratio to the base, without the price of its contexts.
    - A draft or draft-extend is learned as an overhead: what it takes in addition to the base
      multiplied by the ratio of plain steps. A ratio alone would be wrong: where the device waits
      for the host, a draft of one step takes as long as one of eight.
    - The rest of a step is learned by number of requests.

    The first time of a shape is dropped if it is far above the expected one, since a first step may
    wait for kernels to be compiled. Later ones are clipped. Not thread-safe.

    runs_ahead: steps without drafts may be launched before the tokens of the last step are known.
        The table adds the rest before such steps to every step. Other steps have a longer rest,
        and the difference is the table's wait.
    """

    def __init__(self, base: StepCosts, *, runs_ahead: bool = False) -> None:
        self.num_observed = 0
        self._base, sizes = base, base.batch_sizes
        self._verify = _Part(sizes, lambda n, width: base.verify_ms(n, [width])[0])
        self._verify.price = base.context_ms(1)
        # The price of a draft or draft-extend is the ratio of plain steps in the last table.
        self._extend = _Part(sizes, lambda n, width: base.draft_extend_ms(n, [width])[0], 1.0)
        self._draft = _Part(sizes, lambda n, steps: base.draft_ms([n], steps)[0], 1.0)
        self._rest = _Part(sizes, lambda *_: 0.0)
        self._rest_before_ahead = _Part(sizes, lambda *_: 0.0) if runs_ahead else self._rest

    def observe_verify(
        self, num_requests: int, width: int, milliseconds: float, *, num_context: int = 0
    ) -> None:
        """num_context: tokens in the KV caches of the requests of a verification."""
        self.num_observed += 1
        step, shape, part = self.num_observed, (num_requests, width), self._verify
        of_base = part.base_ms(*shape)
        ratio = max(part.predict(step, shape, self._draft.price), 1.0)
        limit = _CLIP * (ratio + part.price * num_context / of_base)
        part.add(step, shape, milliseconds / of_base, limit, num_context / of_base)

    def observe_extend(self, num_requests: int, width: int, milliseconds: float) -> None:
        self._observe_overhead(self._extend, (num_requests, width), milliseconds)

    def observe_draft(self, num_requests: int, num_steps: int, milliseconds: float) -> None:
        self._observe_overhead(self._draft, (num_requests, num_steps), milliseconds)

    def observe_rest(
        self, num_requests: int, milliseconds: float, *, is_before_ahead: bool = False
    ) -> None:
        """What a step took in addition to these parts. is_before_ahead: the next step was launched
        before the tokens of this one were known."""
        rest = self._rest_before_ahead if is_before_ahead else self._rest
        step, shape = self.num_observed, (num_requests, 0)
        expected = max(rest.predict(step, shape, rest.mean.value), _MIN_MS)
        rest.add(step, shape, milliseconds, _CLIP * expected, 0.0)

    def table(self) -> StepCosts:
        """The base table, corrected by everything that was observed so far."""
        base, step, times = self._base, self.num_observed, np.array(self._base.verify)
        self._verify.price = self._verify.slope(base.context_ms(1))
        of_base = np.array([self._verify.base_ms(*shape) for shape in self._verify.shapes])
        ratios = self._ratios_by_nodes(of_base)
        self._extend.price = self._draft.price = float(ratios[0, 0])
        verify, weights = self._verify.at(step, base.widths, rising(ratios * times), of_base)
        verify = capped(np.maximum(verify, _MIN_RATIO * times), weights)
        extend, _ = self._with_overhead(self._extend, base.widths, np.array(base.draft_extend))
        once, per_round = self._draft_lines()
        rest, waited = (
            part.at(step, (0, 1), np.full((len(times), 2), part.mean.value))[0][:, 0]
            for part in (self._rest_before_ahead, self._rest)
        )
        if self._rest.mean.step - self._rest_before_ahead.mean.step > _FORGET_AHEAD_AFTER:
            rest = 0 * rest  # else waits would look free, and no step would run ahead to measure it
        learned_wait = np.maximum(waited - rest, 0.0)
        wait = learned_wait if self._rest.shapes else np.array(base.wait or 0.0)
        return base.model_copy(
            update={
                "about": f"{base.about}, refined by its steps",
                "verify": rising(verify + rest[:, None]).tolist(),
                "draft_extend": rising(extend).tolist(),
                "draft_round": per_round.tolist(),
                "draft_once": once.tolist(),
                "context": 1000 * self._verify.price or None,
                "wait": wait.tolist() if wait.any() else None,
            }
        )

    def _ratios_by_nodes(self, of_base: Float64) -> Float64:
        """The prior of each verification's ratio: float64[num_batch_sizes, num_widths]. It is a
        line through the ratios of the shapes that ran, by nodes per millisecond of the base. If
        nodes turn out cheaper than in the base, they become cheaper in all shapes.

        of_base: the base's milliseconds of the shapes that ran."""
        per_ms = np.outer(self._base.batch_sizes, np.array(self._base.widths) - 1)
        per_ms = per_ms / np.array(self._base.verify)
        ratio = self._verify.mean.shrunk(self.num_observed, 1.0, self._verify.price)
        found, weights = self._verify.values(self.num_observed)
        if weights.any():
            nodes = np.array([n * (width - 1) for n, width in self._verify.shapes]) / of_base
            mean_nodes, _, slope = _line(nodes, found, weights, _PRIOR * nodes.max() ** 2)
            # The line is not reliable far beyond the shapes that ran.
            ratio += slope * (np.minimum(per_ms, 2 * nodes.max()) - mean_nodes)
        return np.maximum(np.full(per_ms.shape, ratio), _MIN_RATIO)

    def _observe_overhead(self, part: "_Part", shape: _Shape, milliseconds: float) -> None:
        step, of_base = self.num_observed, part.base_ms(*shape)
        overall = float(part.overhead(step, np.array(of_base)))
        expected = part.price * of_base + part.predict(step, shape, overall)
        part.add(step, shape, milliseconds, _CLIP * max(expected, of_base, _MIN_MS), of_base)

    def _with_overhead(
        self, part: "_Part", columns: Sequence[int], of_base: Float64
    ) -> tuple[Float64, Float64]:
        """Times and weights of a part: float64[num_batch_sizes, num_columns] each, as of_base."""
        overall = part.overhead(self.num_observed, of_base)
        overhead, weights = part.at(self.num_observed, columns, overall)
        return capped(np.maximum(part.price * of_base + overhead, 0.0), weights), weights

    def _draft_lines(self) -> list[Float64]:
        """The line through the times of drafts by number of steps: what a draft takes once, and
        what each round takes, float64[num_batch_sizes] each."""
        steps = sorted({1, 2, *(num for _, num in self._draft.shapes)})
        of_base = np.array([self._base.draft_ms(self._base.batch_sizes, num) for num in steps]).T
        times, weights = self._with_overhead(self._draft, steps, of_base)
        weights, rounds = weights + 1.0, np.array(steps) - 1.0
        mean_rounds, mean_ms, slope = _line(rounds, times, weights)
        # Neither term may be negative: one that is becomes 0, and the line goes through the mean.
        slope = np.clip(slope, 0.0, mean_ms / mean_rounds)
        once = np.maximum(mean_ms - slope * mean_rounds, 0.0)
        of_size = weights.sum(axis=1, keepdims=True)
        return [rising(capped(terms[:, None], of_size))[:, 0] for terms in (once, slope)]


class _Mean:
    """Moving means of a value and of its factor. price * factor is a part of the value.

    value, factor: of a verification, its ratio to the base, and its tokens of context for each
        millisecond of the base. Of other parts, the milliseconds, and the base's milliseconds.
    step: number of the latest observation. num, num_seen: decayed weight and number of all.
    """

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.num = self.num_seen = self.value = self.factor = 0.0

    def add(self, step: int, value: float, factor: float) -> None:
        self.num_seen = self.weight(step) + 1
        self.num = self.num * _KEPT ** (step - self.step) + 1
        self.step = step
        self.value += (value - self.value) / self.num
        self.factor += (factor - self.factor) / self.num

    def weight(self, step: int) -> float:
        """The weight of the mean. It does not decay, so that a rare shape keeps it for long."""
        return self.num_seen if step - self.step <= _FORGET_AFTER else 0.0

    def shrunk(self, step: int, prior: float, price: float) -> float:
        """The value without price * factor, shrunk to the prior."""
        weight, value = self.weight(step), self.value - price * self.factor
        return (weight * value + _PRIOR * prior) / (weight + _PRIOR)


class _Part:
    """The times of one part of a step, by shape and over all shapes.

    sizes: the batch sizes of the table.
    base_ms: the base's milliseconds of a shape.
    price: how much the value grows with one unit of the factor (see _Mean).
    """

    def __init__(self, sizes: Sequence[int], base_ms: _BaseMs, price: float = 0.0) -> None:
        self.price, self._sizes = price, sizes
        # Cached, because every step looks these times up and the base does not change.
        self.base_ms = cache(lambda *shape: float(base_ms(*shape)))
        self.mean, self.shapes = _Mean(), dict[_Shape, _Mean]()
        self._square = self._product = 0.0

    def add(self, step: int, shape: _Shape, value: float, limit: float, factor: float) -> None:
        """Adds a value, clipped to the limit. A shape's first value above it is dropped."""
        mean = self.shapes.get(shape)
        if mean is None or step - mean.step > _FORGET_AFTER:
            mean = self.shapes[shape] = _Mean(step)
            if value > limit:
                return
        value = min(value, limit)
        from_mean = factor - mean.factor
        share = mean.num / (mean.num + 1) * from_mean
        self._square = _KEPT * self._square + share * from_mean
        self._product = _KEPT * self._product + share * (value - mean.value)
        self.mean.add(step, value, factor)
        mean.add(step, value, factor)

    def slope(self, prior: float) -> float:
        """Fits the price within shapes, since wide steps may be those of long contexts."""
        weight = _PRIOR * self.mean.factor**2
        square = self._square + weight
        return max((self._product + weight * prior) / square, 0.0) if square > 0 else prior

    def predict(self, step: int, shape: _Shape, prior: float) -> float:
        """The value of a shape without price * factor, shrunk to the prior."""
        return self.shapes.get(shape, _Mean()).shrunk(step, prior, self.price)

    def overhead(self, step: int, of_base: Float64) -> Float64:
        """The overhead of shapes that never ran: the mean overhead of those that ran, or less in
        proportion to of_base. Otherwise no short draft would ever be tried."""
        share = np.minimum((of_base + 1e-9) / (self.mean.factor + 1e-9), 1.0)
        return self.mean.shrunk(step, 0.0, self.price) * share

    def values(self, step: int) -> tuple[Float64, Float64]:
        """The values of shapes without price * factor, and their weights: float64[num_shapes]."""
        means = self.shapes.values()
        found = np.array([mean.value - self.price * mean.factor for mean in means])
        return found, np.array([mean.weight(step) for mean in means])

    def at(
        self, step: int, columns: Sequence[int], prior: Float64, of_base: Float64 | float = 1.0
    ) -> tuple[Float64, Float64]:
        """Milliseconds at the entries of a table, and the weight of the observations that each is
        learned from: float64[num_sizes, num_columns] each. A shape between entries is interpolated,
        so this is a least-squares fit, in which the shrinkage to the prior is the ridge.

        prior: milliseconds of entries that never ran; same shape.
        of_base: the base's milliseconds of each shape, if its value is a ratio to them."""
        if not self.shapes:
            return prior, np.zeros(prior.shape)
        rows, places = np.array(list(self.shapes)).T
        of_rows, of_places = shares_of(rows, self._sizes), shares_of(places, columns)
        # What each entry counts for at each shape: float64[num_shapes, num_entries].
        shares = (of_rows[:, :, None] * of_places[:, None, :]).reshape(len(rows), -1)
        found, weights = self.values(step)
        beyond = weights * (found * of_base - shares @ prior.ravel())
        gram = (shares.T * weights) @ shares + _PRIOR * np.eye(prior.size)
        fitted = prior + np.linalg.solve(gram, shares.T @ beyond).reshape(prior.shape)
        return fitted, (weights @ shares).reshape(prior.shape)


def _line(x: Float64, y: Float64, weights: Float64, ridge: float = 0.0) -> tuple[Float64, ...]:
    """Weighted means of x and y and the slope of the line through them, along the last axis."""
    total = weights.sum(axis=-1)
    mean_x, mean_y = ((weights * values).sum(axis=-1) / total for values in (x, y))
    from_mean = x - mean_x[..., None]
    product = (weights * from_mean * (y - mean_y[..., None])).sum(axis=-1)
    return mean_x, mean_y, product / ((weights * from_mean**2).sum(axis=-1) + ridge + 1e-9)
