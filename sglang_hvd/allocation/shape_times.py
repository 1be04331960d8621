"""What verifications of each shape take beside what a table of costs says."""

from collections.abc import Sequence

import numpy as np

from sglang_hvd.allocation.costs import Float64, Int64, StepCosts
from sglang_hvd.allocation.latest_times import FORGOTTEN, LEAST_PRIOR, PRIOR_TIMES, LatestTimes

# What nodes, and steps of a shape, take beside the table changes what it says of any step by this
# share at most, and what nodes take that of the mean step.
_MOST_BESIDE = 0.5


class ShapeTimes:
    """What verifications take, by the scaled table and what the latest steps of the server took
    beside it: a node, and steps of as many requests and nodes. Steps are compared within a batch
    size only, so that what contexts take beside what is known of them is charged to neither."""

    def __init__(self, base: StepCosts) -> None:
        self._base = base
        # Sums of expected and measured times, by requests and nodes of each.
        self._of_shape: dict[tuple[int, int], LatestTimes] = {}

    def add(
        self,
        step: int,
        shape: tuple[int, int],
        expected: float,
        measured: float,
        *,
        num_context: int,
    ) -> None:
        sums = self._of_shape.setdefault(shape, LatestTimes())
        sums.add(step, expected, measured, num_context)

    def times(self, step: int, ratio: float, of_token: float) -> Float64:
        """Milliseconds without contexts: float64[len(batch_sizes), len(widths)] of the table.

        ratio: of measured times to the table's, of all steps. of_token: milliseconds that each
            token of context takes beside that.
        """
        (ratio, per_node), of_shapes, num_latest = self._split(step, ratio, of_token)
        base = self._base
        times = ratio * np.array(base.verify)
        beside = per_node * np.outer(base.batch_sizes, np.array(base.widths) - 1)
        beside += of_shapes * base.verify
        times += np.clip(beside, -_MOST_BESIDE * times, _MOST_BESIDE * times)
        times = _capped(times, num_latest)
        # Nodes may take less than the table says, and none takes less than nothing.
        return np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)

    def _split(
        self, step: int, ratio: float, of_token: float
    ) -> tuple[tuple[float, float], Float64, Float64]:
        """The ratio to multiply the table by and milliseconds for each node beside the roots, which
        together leave the mean of the latest steps' times as it is with the ratio alone; that is
        all there is where steps of as many requests do not differ in width. What steps take beside
        that, as shares of the table's times, and of how many of the latest steps each entry of the
        table is: float64[len(batch_sizes), len(widths)].
        """
        for sums in self._of_shape.values():
            sums.forget(step)
        self._of_shape = {
            shape: sums for shape, sums in self._of_shape.items() if sums.num >= FORGOTTEN
        }
        base, shapes = self._base, self._of_shape
        if not shapes:
            nothing = np.zeros((len(base.batch_sizes), len(base.widths)))
            return (ratio, 0.0), nothing, nothing
        # By shape: how many steps, and of one of them requests, nodes, milliseconds.
        num, *totals = np.array(
            [(sums.num, sums.x, sums.y - of_token * sums.context) for sums in shapes.values()]
        ).T
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
            prior = PRIOR_TIMES * float(num @ most_nodes**2) / float(num.sum())
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
        of_table = PRIOR_TIMES * num_latest / np.maximum(num_seen, 1e-9)
        of_shapes = np.linalg.solve(
            (shares.T * num) @ shares + np.diag(np.maximum(of_table, LEAST_PRIOR)),
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
