"""Keeps a table that was timed beforehand right by the steps that are served."""

from __future__ import annotations

from functools import cache

import numpy as np

from sglang_hvd.allocation.cost_fit import RestTimes, split_rest
from sglang_hvd.allocation.costs import Float64, StepCosts

# What the sums keep of themselves with each further time: the last few hundred count.
_KEPT = 0.998

# What a part begins at has the weight of so many times.
_PRIOR_TIMES = 4.0
# The ratio that it begins at, of so many times as spread, or of times of so much spread in the
# expected ones, in their squared mean: less tells little of a ratio.
_PRIOR_SPREAD = 0.05

# What nodes take beside the table changes what it says of any step, and of the mean one, by this
# share at most.
_MOST_OF_NODES = 0.5

# A time this much above what is expected tells of the machine, not of the step: the first step
# of a batch size may wait for kernels to be compiled. It does not count, unless half of the latest
# times of steps of its shape are such: then these take so long now, and count up to this.
_OUTLIER = 3.0
_LEAST_MS = 0.5  # of what is expected, likewise: a short part waits as long for the host as any
_LATEST = 8

# What is expected of a part is summed up anew for its first times, then after so many steps.
_EXPECT_EVERY = 16


class CostScale:
    """observe_* takes in times in milliseconds. The verifications are multiplied by what their
    times are over what the table says. Wide ones may be further off than narrow ones, as with
    longer contexts than the table was timed with, or less far, as where the device waits for the
    host whatever they are: what a node takes more is learned beside that. So is what a step takes
    beside its parts.

    Of the draft-extends and the model drafter's drafts it is learned what they take more whatever
    their size, and a ratio to the table. They are short, and a slow host launches a draft in one
    step in ten times what a GPU takes for it: by a ratio alone one in three steps would be ten
    times as dear, and none would be tried. Where the times cannot tell the two apart, what is
    missing is the former. As long as a part is seldom run its ratio is that of the verifications,
    which every step has. Not thread-safe.

    runs_ahead: see RestTimes.
    """

    def __init__(self, base: StepCosts, *, runs_ahead: bool = False) -> None:
        self._base = base
        self._verify, self._nodes = _Ratio(), _NodeTimes()
        self._extend, self._draft = _Line(), _Line()
        self._rest = RestTimes(runs_ahead=runs_ahead)
        # What the table says, once looked up: it does not change, and every step asks.
        self._verify_ms = cache(lambda num, width: float(base.verify_ms(num, [width])[0]))
        self._extend_ms = cache(lambda num, width: float(base.draft_extend_ms(num, [width])[0]))
        self._draft_ms = cache(lambda num, steps: float(base.draft_ms([num], steps)[0]))
        self.num_observed = 0

    def observe_verify(self, num_requests: int, width: int, milliseconds: float) -> None:
        """Takes in the milliseconds of a step of the target model."""
        self.num_observed += 1
        expected = self._verify_ms(num_requests, width)
        shape = num_requests, width
        counted = self._verify.add(self.num_observed, shape, expected, milliseconds)
        if counted is not None:
            self._nodes.add(num_requests, width, expected, counted)

    def observe_extend(self, num_requests: int, width: int, milliseconds: float) -> None:
        """Takes in the milliseconds of a draft-extend."""
        expected = self._extend_ms(num_requests, width)
        self._add(self._extend, (num_requests, width), expected, milliseconds)

    def observe_draft(self, num_requests: int, num_steps: int, milliseconds: float) -> None:
        """Takes in the milliseconds of a draft of the model drafter in so many steps."""
        expected = self._draft_ms(num_requests, num_steps)
        self._add(self._draft, (num_requests, num_steps), expected, milliseconds)

    def observe_rest(
        self, num_requests: int, milliseconds: float, *, is_before_ahead: bool = False
    ) -> None:
        """Takes in the milliseconds that a step took beside these. is_before_ahead: the next step
        was launched ahead of its tokens."""
        self._rest.add(num_requests, milliseconds, is_before_ahead=is_before_ahead)

    def coefficients(self) -> Float64:
        """All that is learned, so that another process can make the same table: float64[10]."""
        step = self.num_observed
        verify = self._verify.value(step)
        parts = [of for part in (self._extend, self._draft) for of in part.value(step, verify)]
        return np.concatenate([self._nodes.split(verify), parts, self._rest.solve()])

    def _add(
        self, part: _Line, shape: tuple[int, int], expected: float, milliseconds: float
    ) -> None:
        step = self.num_observed
        part.add(step, shape, expected, milliseconds, before=self._verify.value(step))

    def table(self, coefficients: Float64) -> StepCosts:
        """The base as the coefficients change it."""
        verify, per_node, extend_more, extend, draft_more, draft = coefficients[:6].tolist()
        base = self._base
        num_requests, widths = np.array(base.batch_sizes), np.array(base.widths)
        times = verify * np.array(base.verify)
        of_nodes = per_node * np.outer(num_requests, widths - 1)
        times += np.clip(of_nodes, -_MOST_OF_NODES * times, _MOST_OF_NODES * times)
        # Nodes may take less than the table says, and none takes less than nothing.
        times = np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)
        rest, wait = split_rest(coefficients[6:], num_requests)
        times += rest[:, None]
        once = base.draft_once or (0.0,) * len(base.batch_sizes)
        return StepCosts(
            about=f"{base.about}, refined by its steps",
            batch_sizes=base.batch_sizes,
            widths=base.widths,
            verify=tuple(map(tuple, times.tolist())),
            draft_round=tuple(time * draft for time in base.draft_round),
            draft_extend=tuple(
                tuple(time * extend + extend_more for time in row) for row in base.draft_extend
            ),
            draft_once=tuple(time * draft + draft_more for time in once),
            wait=tuple(wait.tolist()) if wait.any() else None,
        )


class _Outliers:
    """Times far above what was expected, by shape."""

    def __init__(self) -> None:
        # Which of its latest times were: a bit for each, the newest lowest.
        self._latest: dict[tuple[int, int], int] = {}

    def counted(self, shape: tuple[int, int], measured: float, most: float) -> float | None:
        """A time as it counts; None if it does not. most: more than that is far above."""
        is_outlier = measured > most
        latest = (self._latest.get(shape, 0) << 1 | is_outlier) & ((1 << _LATEST) - 1)
        self._latest[shape] = latest
        if is_outlier and 2 * latest.bit_count() < _LATEST:
            return None
        return min(measured, most)


class _Sums:
    """Sums over the latest times: how many, a variable x, others, and the products of x with itself
    and with them."""

    __slots__ = ("_step", "_xx", "_xys", "num", "x", "ys")

    def __init__(self, num_others: int) -> None:
        self._step = 0
        self.num = self.x = self._xx = 0.0
        self.ys, self._xys = [0.0] * num_others, [0.0] * num_others

    def add(self, step: int, x: float, *others: float) -> None:
        """step: the number of the time, of all steps."""
        self.forget(step)
        self.num += 1
        self.x += x
        self._xx += x * x
        for i, y in enumerate(others):
            self.ys[i] += y
            self._xys[i] += x * y

    def forget(self, step: int) -> None:
        """Counts the sums for what they are worth at that step."""
        if step == self._step:
            return
        kept = _KEPT ** (step - self._step)
        self._step = step
        self.num *= kept
        self.x *= kept
        self._xx *= kept
        for i in range(len(self.ys)):
            self.ys[i] *= kept
            self._xys[i] *= kept

    def centred(self) -> tuple[float, ...]:
        """The products, of x with itself first, where each variable is taken from its mean."""
        if self.num < 1e-9:
            return (0.0,) * (1 + len(self.ys))
        mean = self.x / self.num
        with_others = (xy - mean * y for xy, y in zip(self._xys, self.ys, strict=True))
        return max(self._xx - mean * self.x, 0.0), *with_others


class _Ratio:
    """Ratio of the measured times to the expected ones, in the latest steps of the server."""

    def __init__(self) -> None:
        self._sums = _Sums(1)  # of expected and measured times
        self._outliers = _Outliers()

    def add(
        self, step: int, shape: tuple[int, int], expected: float, measured: float
    ) -> float | None:
        """Takes in a time and returns it as it counts; None if it does not.

        step: its number, of all steps. shape: what the expected time is of.
        """
        most = _OUTLIER * max(self.value(step), 1.0) * expected
        counted = self._outliers.counted(shape, measured, most)
        if counted is not None:
            self._sums.add(step, expected, counted)
        return counted

    def value(self, step: int) -> float:
        """The ratio at that step; without times 1."""
        self._sums.forget(step)
        if self._sums.num < 1e-9:
            return 1.0
        prior = _PRIOR_TIMES * self._sums.x / self._sums.num
        return (self._sums.ys[0] + prior) / (self._sums.x + prior)


class _Line:
    """Measured times as a part that does not depend on the size and a ratio to the expected ones,
    in the latest steps of the server, whether or not they ran this part: what a part that is seldom
    run took long ago does not keep it from being run again. The ratio follows from how times of as
    many requests differ: those of others may take longer for their contexts."""

    def __init__(self) -> None:
        # Sums of expected and measured times, by the number of requests.
        self._of_batch: dict[int, _Sums] = {}
        self._outliers = _Outliers()
        self._num_added = 0
        self._known, self._known_at = (0.0, 1.0), 0  # a value of not long ago, and its step

    def add(
        self,
        step: int,
        shape: tuple[int, int],
        expected: float,
        measured: float,
        *,
        before: float,
    ) -> None:
        """Takes in a time, if it counts.

        step: its number, of all steps. shape: requests, and what else the expected time is of.
        before: see value.
        """
        if self._num_added < _EXPECT_EVERY or step - self._known_at >= _EXPECT_EVERY:
            self._known, self._known_at = self.value(step, before), step
        self._num_added += 1
        more, ratio = self._known
        # A part that was not timed since may well take what the table says.
        most = _OUTLIER * max(more + ratio * expected, expected, _LEAST_MS)
        counted = self._outliers.counted(shape, measured, most)
        if counted is not None:
            self._of_batch.setdefault(shape[0], _Sums(1)).add(step, expected, counted)

    def value(self, step: int, before: float) -> tuple[float, float]:
        """Milliseconds and ratio at that step, neither negative; without times 0 and before."""
        num = x = y = spread = missing = 0.0
        for sums in self._of_batch.values():
            sums.forget(step)
            num += sums.num
            x += sums.x
            y += sums.ys[0]
            of_batch, with_times = sums.centred()
            spread += of_batch
            missing += with_times - before * of_batch
        if num < 1e-9:
            return 0.0, before
        prior = max(_PRIOR_SPREAD * (x / num) ** 2, _PRIOR_TIMES * spread / num)
        ratio = max(before + missing / (spread + prior), 0.0) if prior > 0 else before
        more = (y - ratio * x) / (num + _PRIOR_TIMES)
        if more >= 0:
            return more, ratio
        prior = _PRIOR_TIMES * x / num
        return 0.0, (y + before * prior) / (x + prior)


class _NodeTimes:
    """Milliseconds per node that the scaled table misses: the slope of the residual (measured -
    ratio * table) over the number of nodes, in the latest steps. Steps are compared within a batch
    size only, so that what a longer context adds per request is not charged to nodes."""

    def __init__(self) -> None:
        # By the number of requests: sums of nodes beside the roots, expected and measured times.
        self._of_batch: dict[int, _Sums] = {}
        self._most_nodes: dict[int, int] = {}
        self._num_steps = 0

    def add(self, num_requests: int, width: int, expected: float, measured: float) -> None:
        self._num_steps += 1
        num_nodes = num_requests * (width - 1)
        self._most_nodes[num_requests] = max(self._most_nodes.get(num_requests, 0), num_nodes)
        sums = self._of_batch.setdefault(num_requests, _Sums(2))
        sums.add(self._num_steps, num_nodes, expected, measured)

    def split(self, ratio: float) -> tuple[float, float]:
        """The ratio to multiply the table by, and milliseconds for each node beside the roots. Both
        together leave the mean of the latest steps' times as it is with the ratio alone, which is
        all there is where steps of as many requests do not differ in width."""
        num = table = nodes = spread = left = most_squared = 0.0
        for num_requests, sums in self._of_batch.items():
            sums.forget(self._num_steps)
            num += sums.num
            most_squared += sums.num * self._most_nodes[num_requests] ** 2
            table += sums.ys[0]
            nodes += sums.x
            of_batch, with_table, with_times = sums.centred()
            left += with_times - ratio * with_table
            spread += of_batch
        # Fewer nodes than one in a thousand milliseconds tell nothing.
        if nodes <= 1e-3 * table:
            return ratio, 0.0
        share = nodes / table
        # Steps that were wide are forgotten; what they told is not held for certain since.
        prior = _PRIOR_TIMES * most_squared / num
        most = _MOST_OF_NODES * ratio / share
        per_node = min(max(left / (spread + prior), -most), most)
        return ratio - per_node * share, per_node
