"""Keeps a table that was timed beforehand right by the steps that are served."""

from __future__ import annotations

from functools import cache

import numpy as np

from sglang_hvd.allocation.cost_fit import RestFit
from sglang_hvd.allocation.costs import Float64, StepCosts

# What the sums keep of themselves with each further time: the last few hundred count.
_KEPT = 0.998

# What a part begins at has the weight of so many times.
_PRIOR_TIMES = 4.0
# Its ratio, that of a spread of expected times of so many times their squared mean: less tells
# little of a ratio.
_PRIOR_SPREAD = 0.25

# What nodes take beside the table changes what it says of any step, and of the mean one, by this
# share at most.
_MOST_OF_NODES = 0.5

# A time this much above what is expected tells of the machine, not of the step: the first step
# of a batch size may wait for kernels to be compiled. It does not count, unless half of the latest
# times of steps of its shape are such: then these take so long now, and count up to this.
_OUTLIER = 3.0
_LEAST_MS = 0.5  # of what is expected, likewise: a short part waits as long for the host as any
_LATEST = 8


class CostScale:
    """observe_* takes in times in milliseconds. Of each part of the table, the verifications, the
    draft-extends and the drafts of the model drafter, is learned what it takes more whatever its
    size, as where the GPU waits for the host, and a ratio to the table. Where the times cannot
    separate the two, what is missing goes to the first: else a draft in one step, which a slow host
    launches in ten times what the GPU takes, would make one in three steps ten times as dear, and
    none would be tried. As long as a part is seldom run its ratio is that of the verifications,
    which every step has. Wide verifications may be further off than narrow ones, as with longer
    contexts than the table was timed with: what a node more takes is learned beside that. So is
    what a step takes beside its parts. Not thread-safe.
    """

    def __init__(self, base: StepCosts) -> None:
        self._base = base
        self._verify, self._extend, self._draft = _Line(), _Line(), _Line()
        self._nodes = _NodeTimes()
        self._rest = RestFit()
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

    def observe_rest(self, num_requests: int, milliseconds: float) -> None:
        """Takes in the milliseconds that a step took beside these."""
        self._rest.add(num_requests, milliseconds)

    def coefficients(self) -> Float64:
        """All that is learned, so that another process can make the same table: float64[9]."""
        step = self.num_observed
        more, ratio = self._verify.value(step)
        parts = [of for part in (self._extend, self._draft) for of in part.value(step, ratio)]
        return np.concatenate([self._nodes.split(more, ratio), parts, self._rest.solve()])

    def _add(
        self, part: _Line, shape: tuple[int, int], expected: float, milliseconds: float
    ) -> None:
        step = self.num_observed
        _, ratio = self._verify.value(step)
        part.add(step, shape, expected, milliseconds, before=ratio)

    def table(self, coefficients: Float64) -> StepCosts:
        """The base as the coefficients change it."""
        more, verify, per_node, *of_parts, fixed, per_request = coefficients.tolist()
        extend_more, extend, draft_more, draft = of_parts
        base = self._base
        num_requests, widths = np.array(base.batch_sizes), np.array(base.widths)
        times = verify * np.array(base.verify)
        of_nodes = per_node * np.outer(num_requests, widths - 1)
        times += np.clip(of_nodes, -_MOST_OF_NODES * times, _MOST_OF_NODES * times)
        # Nodes may take less than the table says, and none takes less than nothing.
        times = np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)
        times += more + (fixed + per_request * num_requests)[:, None]
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
        )


class _Line:
    """Measured times as a part of what does not depend on the size and a ratio to the expected
    ones, in the latest steps of the server, whether or not they ran this part: what a part that is
    seldom run took long ago does not keep it from being run again."""

    def __init__(self) -> None:
        self._step = 0
        # Sums over the times: how many, expected, measured, and products of the two.
        self._num = self._x = self._y = self._xx = self._xy = 0.0
        # By shape, which of its latest times were outliers: a bit for each, the newest lowest.
        self._outliers: dict[tuple[int, int], int] = {}

    def add(
        self,
        step: int,
        shape: tuple[int, int],
        expected: float,
        measured: float,
        before: float = 1.0,
    ) -> float | None:
        """Takes in a time and returns it as it counts; None if it does not.

        step: its number, of all steps. shape: what the expected time is of.
        """
        if expected <= 0:
            return None
        more, ratio = self.value(step, before)
        # A part that was not timed since may well take what the table says.
        most = _OUTLIER * max(more + ratio * expected, expected, _LEAST_MS)
        is_outlier = measured > most
        outliers = (self._outliers.get(shape, 0) << 1 | is_outlier) & ((1 << _LATEST) - 1)
        self._outliers[shape] = outliers
        if is_outlier and 2 * outliers.bit_count() < _LATEST:
            return None
        counted = min(measured, most)
        self._num += 1
        self._x += expected
        self._y += counted
        self._xx += expected * expected
        self._xy += expected * counted
        return counted

    def value(self, step: int, before: float = 1.0) -> tuple[float, float]:
        """Milliseconds and ratio at that step, neither negative; without times 0 and before."""
        kept = _KEPT ** (step - self._step)
        self._step = step
        self._num *= kept
        self._x *= kept
        self._y *= kept
        self._xx *= kept
        self._xy *= kept
        if self._num < 1e-9:
            return 0.0, before
        mean = self._x / self._num
        spread = max(self._xx - mean * self._x, 0.0)
        missing = self._xy - mean * self._y - before * spread
        ratio = max(before + missing / (spread + _PRIOR_SPREAD * mean * mean), 0.0)
        more = (self._y - ratio * self._x) / (self._num + _PRIOR_TIMES)
        if more >= 0:
            return more, ratio
        prior = _PRIOR_TIMES * mean
        return 0.0, (self._y + before * prior) / (self._x + prior)


class _NodeTimes:
    """Milliseconds per node that the scaled table misses: the slope of the residual (measured -
    ratio * table) over the number of nodes, in the latest steps. Steps are compared within a batch
    size only, so that what a longer context adds per request is not charged to nodes."""

    def __init__(self) -> None:
        self._of_batch: dict[int, _NodeSums] = {}  # by the number of requests
        self._num_steps = 0
        self._most_nodes = 0

    def add(self, num_requests: int, width: int, expected: float, measured: float) -> None:
        self._num_steps += 1
        num_nodes = num_requests * (width - 1)
        self._most_nodes = max(self._most_nodes, num_nodes)
        sums = self._of_batch.setdefault(num_requests, _NodeSums())
        sums.add(self._num_steps, expected, num_nodes, measured)

    def split(self, more: float, ratio: float) -> tuple[float, float, float]:
        """What to add to the table, the ratio to multiply it by, and milliseconds for each node
        beside the roots. They leave the mean of the latest steps' times as it is without the last,
        which is 0 where steps of as many requests do not differ in width."""
        num = table = nodes = spread = left = 0.0
        for sums in self._of_batch.values():
            sums.forget(self._num_steps)
            num += sums.num
            table += sums.table
            nodes += sums.nodes
            of_batch = sums.slope(ratio)
            left += of_batch[0]
            spread += of_batch[1]
        # Fewer nodes than one in a thousand milliseconds tell nothing.
        if nodes <= 1e-3 * table:
            return more, ratio, 0.0
        # Steps that were wide are forgotten; what they told is not held for certain since.
        prior = _PRIOR_TIMES * self._most_nodes**2
        most = _MOST_OF_NODES * ratio * table / nodes
        per_node = min(max(left / (spread + prior), -most), most)
        more -= per_node * nodes / num
        if more < 0:
            ratio += more * num / table
            more = 0.0
        return more, ratio, per_node


class _NodeSums:
    """Sums over the latest steps of one batch size.

    num: of these steps. table: milliseconds that the table says. nodes: nodes beside the roots.
    """

    __slots__ = ("_products", "_step", "_time", "nodes", "num", "table")

    def __init__(self) -> None:
        self._step = 0
        self.num = self.table = self.nodes = self._time = 0.0
        # Sums of nodes * table, nodes * nodes and nodes * measured time.
        self._products = 0.0, 0.0, 0.0

    def add(self, step: int, expected: float, num_nodes: int, measured: float) -> None:
        """A step took so long. step: its number, of all."""
        self.forget(step)
        self.num += 1
        self.table += expected
        self.nodes += num_nodes
        self._time += measured
        with_table, with_nodes, with_time = self._products
        self._products = (
            with_table + num_nodes * expected,
            with_nodes + num_nodes * num_nodes,
            with_time + num_nodes * measured,
        )

    def forget(self, step: int) -> None:
        """Counts the sums for what they are worth at that step."""
        kept = _KEPT ** (step - self._step)
        self._step = step
        self.num *= kept
        self.table *= kept
        self.nodes *= kept
        self._time *= kept
        with_table, with_nodes, with_time = self._products
        self._products = kept * with_table, kept * with_nodes, kept * with_time

    def slope(self, ratio: float) -> tuple[float, float]:
        """Numerator and denominator of the slope of measured - ratio * table over the number of
        nodes, both variables centred."""
        if self.num < 1e-9:
            return 0.0, 0.0
        mean = self.nodes / self.num
        with_table, with_nodes, with_time = self._products
        left = with_time - mean * self._time - ratio * (with_table - mean * self.table)
        return left, max(with_nodes - mean * self.nodes, 0.0)
