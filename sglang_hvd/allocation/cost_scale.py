"""Keeps a table that was timed beforehand right by the steps that are served."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from sglang_hvd.allocation.cost_fit import Int64, RestTimes, split_rest
from sglang_hvd.allocation.costs import Float64, StepCosts

# What the sums keep of themselves with each further time: the last few hundred count.
_KEPT = 0.998

# What a part, and steps of a shape, begin at counts as so many times beside all that were seen, of
# which the latest make up the mean: what is timed now and then only would else never be taken for
# what it is. Of the latest it counts as this at least, so that what is timed no more is forgotten.
_PRIOR_TIMES = 4.0
_LEAST_PRIOR = 0.1
# The ratio that it begins at, of so many times as spread, or of times of so much spread in the
# expected ones, in their squared mean: less tells little of a ratio.
_PRIOR_SPREAD = 0.05

# What nodes, and steps of a shape, take beside the table changes what it says of any step by this
# share at most, and what nodes take that of the mean step.
_MOST_BESIDE = 0.5

# A part, or a shape, of which less is left among the latest steps is as if it was never timed.
_FORGOTTEN = 0.02

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
    host whatever they are: what a node takes more is learned beside that. So is what steps of a
    shape take more, as where the machine was disturbed while it timed them, and what a step takes
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
        self._verify, self._shapes = _Ratio(), _ShapeTimes(base)
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
            self._shapes.add(self.num_observed, shape, expected, counted)

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
        """All that is learned, so that another process can make the same table: float64[8], and the
        times of verifications without what steps take beside their parts."""
        step = self.num_observed
        verify = self._verify.value(step)
        parts = [of for part in (self._extend, self._draft) for of in part.value(step, verify)]
        times = self._shapes.times(step, verify)
        return np.concatenate([parts, self._rest.solve(), times.ravel()])

    def _add(
        self, part: _Line, shape: tuple[int, int], expected: float, milliseconds: float
    ) -> None:
        step = self.num_observed
        part.add(step, shape, expected, milliseconds, before=self._verify.value(step))

    def table(self, coefficients: Float64) -> StepCosts:
        """The base as the coefficients change it."""
        parts, of_rest, verify = np.split(coefficients, [4, 8])
        extend_more, extend, draft_more, draft = parts.tolist()
        base = self._base
        rest, wait = split_rest(of_rest, np.array(base.batch_sizes))
        times = verify.reshape(len(base.batch_sizes), -1) + rest[:, None]
        once = base.draft_once or (0.0,) * len(base.batch_sizes)
        waits = tuple(wait.tolist()) if wait.any() else None
        if not of_rest.any():  # nothing is known of it yet
            waits = base.wait
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
            wait=waits,
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
    """Sums over the latest times: how many, expected and measured ones, x and y, and x with itself
    and with y. num_seen: how many in all."""

    __slots__ = ("_step", "_xx", "_xy", "num", "num_seen", "x", "y")

    def __init__(self) -> None:
        self._step = self.num_seen = 0
        self.num = self.x = self.y = self._xx = self._xy = 0.0

    def add(self, step: int, x: float, y: float) -> None:
        """step: the number of the time, of all steps."""
        self.forget(step)
        self.num_seen += 1
        self.num += 1
        self.x += x
        self.y += y
        self._xx += x * x
        self._xy += x * y

    def forget(self, step: int) -> None:
        """Counts the sums for what they are worth at that step."""
        if step == self._step:
            return
        kept = _KEPT ** (step - self._step)
        self._step = step
        self.num *= kept
        self.x *= kept
        self.y *= kept
        self._xx *= kept
        self._xy *= kept

    def centred(self) -> tuple[float, float]:
        """The products where each is taken from its mean."""
        if self.num < 1e-9:
            return 0.0, 0.0
        mean = self.x / self.num
        return max(self._xx - mean * self.x, 0.0), self._xy - mean * self.y


class _Ratio:
    """Ratio of the measured times to the expected ones, in the latest steps of the server."""

    def __init__(self) -> None:
        self._sums = _Sums()
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
        return (self._sums.y + prior) / (self._sums.x + prior)


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
            self._of_batch.setdefault(shape[0], _Sums()).add(step, expected, counted)

    def value(self, step: int, before: float) -> tuple[float, float]:
        """Milliseconds and ratio at that step, neither negative; without times 0 and before."""
        num = x = y = spread = missing = 0.0
        for sums in self._of_batch.values():
            sums.forget(step)
            num += sums.num
            x += sums.x
            y += sums.y
            of_batch, with_times = sums.centred()
            spread += of_batch
            missing += with_times - before * of_batch
        if num < _FORGOTTEN:
            self._num_added = 0
            return 0.0, before
        times = max(_PRIOR_TIMES * num / self._num_added, _LEAST_PRIOR)
        prior = max(_PRIOR_SPREAD * (x / num) ** 2, times * spread / num)
        ratio = max(before + missing / (spread + prior), 0.0) if prior > 0 else before
        more = (y - ratio * x) / (num + times)
        if more >= 0:
            return more, ratio
        prior = times * x / num
        return 0.0, (y + before * prior) / (x + prior)


class _ShapeTimes:
    """What verifications take, by the scaled table and what the latest steps of the server took
    beside it: a node, and steps of as many requests and nodes. Steps are compared within a batch
    size only, so that what a longer context adds per request is charged to neither."""

    def __init__(self, base: StepCosts) -> None:
        self._base = base
        # Sums of expected and measured times, by requests and nodes of each.
        self._of_shape: dict[tuple[int, int], _Sums] = {}

    def add(self, step: int, shape: tuple[int, int], expected: float, measured: float) -> None:
        self._of_shape.setdefault(shape, _Sums()).add(step, expected, measured)

    def times(self, step: int, ratio: float) -> Float64:
        """Milliseconds: float64[len(batch_sizes), len(widths)] of the table.

        ratio: of measured times to the table's, of all steps.
        """
        (ratio, per_node), of_shapes, num_latest = self._split(step, ratio)
        base = self._base
        times = ratio * np.array(base.verify)
        beside = per_node * np.outer(base.batch_sizes, np.array(base.widths) - 1)
        beside += of_shapes * base.verify
        times += np.clip(beside, -_MOST_BESIDE * times, _MOST_BESIDE * times)
        times = _capped(times, num_latest)
        # Nodes may take less than the table says, and none takes less than nothing.
        return np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)

    def _split(self, step: int, ratio: float) -> tuple[tuple[float, float], Float64, Float64]:
        """The ratio to multiply the table by and milliseconds for each node beside the roots, which
        together leave the mean of the latest steps' times as it is with the ratio alone; that is
        all there is where steps of as many requests do not differ in width. What steps take beside
        that, as shares of the table's times, and of how many of the latest steps each entry of the
        table is: float64[len(batch_sizes), len(widths)].
        """
        for sums in self._of_shape.values():
            sums.forget(step)
        self._of_shape = {
            shape: sums for shape, sums in self._of_shape.items() if sums.num >= _FORGOTTEN
        }
        base, shapes = self._base, self._of_shape
        if not shapes:
            nothing = np.zeros((len(base.batch_sizes), len(base.widths)))
            return (ratio, 0.0), nothing, nothing
        # By shape: how many steps, and of one of them requests, nodes, milliseconds.
        num, *totals = np.array([(sums.num, sums.x, sums.y) for sums in shapes.values()]).T
        expected, measured = (total / num for total in totals)
        num_requests, widths = np.array(list(shapes)).T
        nodes = num_requests * (widths - 1)
        batch_sizes, batch = np.unique(num_requests, return_inverse=True)
        of_batch = batch == np.arange(len(batch_sizes))[:, None]

        def centred(values: Float64) -> Float64:
            means: Float64 = (of_batch @ (num * values)) / (of_batch @ num)
            return values - means[batch]

        num_nodes, table = float(num @ nodes), float(num @ expected)
        left, per_node = centred(measured - ratio * expected), 0.0
        # Fewer nodes than one in a thousand milliseconds tell nothing.
        if num_nodes > 1e-3 * table:
            more_nodes, most_nodes = centred(nodes), (of_batch * nodes).max(axis=1)[batch]
            # Steps that were wide are forgotten; what they told is not held for certain since.
            prior = _PRIOR_TIMES * float(num @ most_nodes**2) / float(num.sum())
            most = _MOST_BESIDE * ratio * table / num_nodes
            per_node = float(num @ (more_nodes * left)) / (float(num @ more_nodes**2) + prior)
            per_node = min(max(per_node, -most), most)
            of_mean = per_node * num_nodes / table
            left = left - per_node * more_nodes + of_mean * centred(expected)
            ratio -= of_mean
        # Of what each entry of the table takes, the shapes between entries have their shares.
        shares = (
            _shares(num_requests, base.batch_sizes)[:, :, None]
            * _shares(widths, base.widths)[:, None, :]
        ).reshape(len(num), -1)
        num_latest = num @ shares
        num_seen = np.array([sums.num_seen for sums in shapes.values()]) @ shares
        # Least squares. Entries that no step tells of stay as they are.
        of_table = _PRIOR_TIMES * num_latest / np.maximum(num_seen, 1e-9)
        of_shapes = np.linalg.solve(
            (shares.T * num) @ shares + np.diag(np.maximum(of_table, _LEAST_PRIOR)),
            shares.T @ (num * left / expected),
        )
        table_shape = len(base.batch_sizes), len(base.widths)
        return (ratio, per_node), of_shapes.reshape(table_shape), num_latest.reshape(table_shape)


def _capped(times: Float64, num_latest: Float64) -> Float64:
    """No entry is above one of as many requests and nodes or more that more steps tell of. It may
    have been disturbed when it was timed, and would make all larger ones as long.

    times, num_latest: float64[len(batch_sizes), len(widths)].
    """
    rows, columns = (place.ravel() for place in np.indices(times.shape))
    of_steps = num_latest.ravel()
    is_larger = (rows >= rows[:, None]) & (columns >= columns[:, None])
    caps = np.where(is_larger & (of_steps > of_steps[:, None]), times.ravel(), np.inf)
    capped: Float64 = np.minimum(times, caps.min(axis=1).reshape(times.shape))
    return capped


def _shares(places: Int64, knots: Sequence[int]) -> Float64:
    """What each knot counts for at each place, as costs between knots are on a line: float64[len(
    places), len(knots)]; beyond the last that one alone."""
    return np.array([np.interp(places, knots, row) for row in np.eye(len(knots))]).T
