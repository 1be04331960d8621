"""Corrects a table of step costs with the times of the steps that a server runs."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from sglang_hvd.costs.table import Float64, StepCosts, capped, rising, shares_of

_KEPT = 0.998  # of an observation's weight in a moving mean, with each further step
_FORGET_AFTER = 4000  # steps without an observation, after which a shape is as if it never ran
_PRIOR = 4.0  # weight, in observations, of what is more general
_CLIP = 3.0  # a time counts up to so many times the expected one,
_MIN_MS = 0.5  # or this if that is more
_MIN_RATIO = 0.1  # of the base's time, which contexts leave to a verification itself
_FORGET_AHEAD_AFTER = 512  # steps, after which the rest before steps that run ahead is unknown

_Shape = tuple[int, int]


class LearnedCosts:
    """observe_* receive times in milliseconds; table is the base, corrected by them.

    Each part of a step has a moving mean of its times by shape: the number of requests, and the
    width or number of draft steps. A verification is learned as a ratio to the base, after the
    price of its contexts. A draft or draft-extend is learned as an overhead beyond the base at the
    speed of plain steps: where the device waits for the host, a draft of one step takes as long as
    one of eight. A shape with n observations is shrunk to what its part would say of it by
    n / (n + 4), and that likewise to the base. The rest of a step is a mean by number of requests.

    The first time of a shape is dropped if it is far above the expected one, since a first step may
    wait for kernels to be compiled. Later ones are clipped. Not thread-safe.

    base: the table to correct.
    runs_ahead: steps without drafts may be launched before the tokens of the last step are known.
        The rest before such a step is part of every step; what it takes more before others is wait.
    """

    def __init__(self, base: StepCosts, *, runs_ahead: bool = False) -> None:
        self.num_observed = 0
        self._base = base
        sizes = base.batch_sizes
        self._verify = _Part(sizes, price=(base.context or 0.0) / 1000)
        # At the speed of plain steps, as the last table has it.
        self._extend, self._draft = _Part(sizes, price=1.0), _Part(sizes, price=1.0)
        self._rest = _Part(sizes)
        self._rest_before_ahead = _Part(sizes) if runs_ahead else self._rest
        # What the base says does not change, and every step asks.
        self._verify_ms = cache(lambda num, width: float(base.verify_ms(num, [width])[0]))
        self._extend_ms = cache(lambda num, width: float(base.draft_extend_ms(num, [width])[0]))
        self._draft_ms = cache(lambda num, steps: float(base.draft_ms([num], steps)[0]))

    def observe_verify(
        self, num_requests: int, width: int, milliseconds: float, *, num_context: int = 0
    ) -> None:
        """A step of the target model. num_context: tokens in the KV caches of its requests."""
        self.num_observed += 1
        step, shape, part = self.num_observed, (num_requests, width), self._verify
        of_base = self._verify_ms(num_requests, width)
        ratio = max(part.predict(step, shape, self._draft.price), 1.0)
        limit = _CLIP * (ratio + part.price * num_context / of_base)
        part.add(step, shape, milliseconds / of_base, limit, num_context / of_base)

    def observe_extend(self, num_requests: int, width: int, milliseconds: float) -> None:
        """A draft-extend."""
        of_base = self._extend_ms(num_requests, width)
        self._observe_overhead(self._extend, (num_requests, width), milliseconds, of_base)

    def observe_draft(self, num_requests: int, num_steps: int, milliseconds: float) -> None:
        """A draft of the model drafter."""
        of_base = self._draft_ms(num_requests, num_steps)
        self._observe_overhead(self._draft, (num_requests, num_steps), milliseconds, of_base)

    def observe_rest(
        self, num_requests: int, milliseconds: float, *, is_before_ahead: bool = False
    ) -> None:
        """What a step took in addition to these parts. is_before_ahead: the next step was launched
        before its tokens were known."""
        rest = self._rest_before_ahead if is_before_ahead else self._rest
        step, shape = self.num_observed, (num_requests, 0)
        expected = max(rest.predict(step, shape, rest.mean.value), _MIN_MS)
        rest.add(step, shape, milliseconds, _CLIP * expected)

    def table(self) -> StepCosts:
        """The base with what was learned so far."""
        base, step, times = self._base, self.num_observed, np.array(self._base.verify)
        self._verify.price = self._verify.slope((base.context or 0.0) / 1000)
        of_base = np.array([self._verify_ms(*shape) for shape in self._verify.shapes])
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
            rest = 0 * rest  # else waits would look free, and no step would run ahead to tell
        wait = np.maximum(waited - rest, 0.0)
        if base.wait is not None and not self._rest.shapes:
            wait = np.array(base.wait)
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
        """Ratios of verifications that never ran, float64[num_batch_sizes, num_widths]: a line by
        nodes through those that did, which take of_base by the base. Nodes that are cheaper than
        the base says are so everywhere."""
        per_ms = np.outer(self._base.batch_sizes, np.array(self._base.widths) - 1)
        per_ms = per_ms / np.array(self._base.verify)
        ratio = self._verify.mean.shrunk(self.num_observed, 1.0, self._verify.price)
        found, weights = self._verify.values(self.num_observed)
        if weights.any():
            nodes = np.array([n * (width - 1) for n, width in self._verify.shapes]) / of_base
            mean_nodes, _, slope = _line(nodes, found, weights, _PRIOR * nodes.max() ** 2)
            # Far beyond the shapes that ran, the line would say anything.
            ratio += slope * (np.minimum(per_ms, 2 * nodes.max()) - mean_nodes)
        return np.maximum(np.full(per_ms.shape, ratio), _MIN_RATIO)

    def _observe_overhead(
        self, part: "_Part", shape: _Shape, milliseconds: float, of_base: float
    ) -> None:
        overall = float(part.overhead(self.num_observed, np.array(of_base)))
        expected = part.price * of_base + part.predict(self.num_observed, shape, overall)
        limit = _CLIP * max(expected, of_base, _MIN_MS)
        part.add(self.num_observed, shape, milliseconds, limit, of_base)

    def _with_overhead(
        self, part: "_Part", columns: Sequence[int], of_base: Float64
    ) -> tuple[Float64, Float64]:
        """Times and weights of a part: float64[num_batch_sizes, num_columns] each, as of_base."""
        overall = part.overhead(self.num_observed, of_base)
        overhead, weights = part.at(self.num_observed, columns, overall)
        return capped(np.maximum(part.price * of_base + overhead, 0.0), weights), weights

    def _draft_lines(self) -> list[Float64]:
        """What a draft takes once and in each round, float64[num_batch_sizes] each: a line through
        what drafts take in several numbers of steps."""
        steps = sorted({1, 2, *(num for _, num in self._draft.shapes)})
        of_base = np.array([self._base.draft_ms(self._base.batch_sizes, num) for num in steps]).T
        times, weights = self._with_overhead(self._draft, steps, of_base)
        weights, rounds = weights + 1.0, np.array(steps) - 1.0
        mean_rounds, mean_ms, slope = _line(rounds, times, weights)
        # Neither term is negative: the line goes through the mean then.
        slope = np.clip(slope, 0.0, mean_ms / mean_rounds)
        once = np.maximum(mean_ms - slope * mean_rounds, 0.0)
        of_size = weights.sum(axis=1, keepdims=True)
        return [rising(capped(terms[:, None], of_size))[:, 0] for terms in (once, slope)]


class _Mean:
    """Moving means of a value, and of a factor that it may be in proportion to.

    value, factor: a verification's ratio to the base, and tokens of context for each millisecond of
        the base; of other parts the milliseconds, and those of the base.
    num: weight that is left of the observations at `step`. num_seen: their number.
    """

    __slots__ = ("factor", "num", "num_seen", "step", "value")

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
        """In observations: rare ones count in full until they are forgotten."""
        return self.num_seen if step - self.step <= _FORGET_AFTER else 0.0

    def shrunk(self, step: int, prior: float, price: float) -> float:
        """The value after the price of the factor, shrunk to the prior."""
        weight, value = self.weight(step), self.value - price * self.factor
        return (weight * value + _PRIOR * prior) / (weight + _PRIOR)


class _Part:
    """The times of one part of a step. sizes: of the table. price: of one of the factor."""

    def __init__(self, sizes: Sequence[int], *, price: float = 0.0) -> None:
        self.price, self._sizes, self.mean = price, sizes, _Mean()
        self.shapes: dict[_Shape, _Mean] = {}
        self._square = self._product = 0.0

    def add(
        self, step: int, shape: _Shape, value: float, limit: float, factor: float = 0.0
    ) -> None:
        """A value, which counts up to the limit; the first one of a shape counts below it only."""
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
        """The price, by values within a shape: wide steps may be those of long contexts."""
        weight = _PRIOR * self.mean.factor**2
        square = self._square + weight
        return max((self._product + weight * prior) / square, 0.0) if square > 0 else prior

    def predict(self, step: int, shape: _Shape, prior: float) -> float:
        """The value of a shape after its factor's price; prior where it never ran."""
        mean = self.shapes.get(shape)
        return prior if mean is None else mean.shrunk(step, prior, self.price)

    def overhead(self, step: int, of_base: Float64) -> Float64:
        """What shapes that never ran take after the price of of_base: as much as those that did, or
        in proportion if that is less, since what seems expensive is never tried."""
        share = np.minimum((of_base + 1e-9) / (self.mean.factor + 1e-9), 1.0)
        return self.mean.shrunk(step, 0.0, self.price) * share

    def values(self, step: int) -> tuple[Float64, Float64]:
        """Of each shape, and the weight of what they are learned from: float64[num_shapes] each."""
        means = self.shapes.values()
        found = np.array([mean.value - self.price * mean.factor for mean in means])
        return found, np.array([mean.weight(step) for mean in means])

    def at(
        self, step: int, columns: Sequence[int], prior: Float64, of_base: Float64 | float = 1.0
    ) -> tuple[Float64, Float64]:
        """Milliseconds at the entries of a table, and the weight of what they are learned from:
        float64[num_sizes, num_columns] each. Shapes between entries are on the lines between them,
        so this is a least-squares fit that has the shrinkage as its ridge.

        prior: same shape, of entries that never ran.
        of_base: milliseconds that the value of each shape is a ratio to.
        """
        if not self.shapes:
            return prior, np.zeros(prior.shape)
        rows, places = np.array(list(self.shapes)).T
        shares = shares_of(rows, self._sizes)[:, :, None] * shares_of(places, columns)[:, None, :]
        shares = shares.reshape(len(rows), -1)
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
