"""What verifications of each shape take beside what a table of costs says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_hvd.allocation.latest_times import FORGOTTEN, LEAST_PRIOR, PRIOR_TIMES, LatestTimes
from sglang_hvd.costs.table import Float64, Int64, StepCosts

# What nodes, and steps of a shape, take beside the table changes what it says of any step by this
# share at most, and what nodes take that of the mean step.
_MOST_BESIDE = 0.5

# The ratio that is left, at least, to the table where contexts are found to take nearly all.
_LEAST_RATIO = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class LearnedTimes:
    """What verifications take: the table times a ratio, changed by what nodes and shapes take
    beside that, and what each token of context takes.

    times: milliseconds without contexts, float64[len(batch_sizes), len(widths)] of the table.
    ratio: of the latest steps' times without contexts to the table's.
    of_token: milliseconds for each token of context, not negative.
    """

    times: Float64
    ratio: float
    of_token: float


class ShapeTimes:
    """What verifications take, by the scaled table and what the latest steps of the server took
    beside it: a token of context, a node, and steps of as many requests and nodes. What the first
    two take is found together, since long contexts may be those that wide steps have, and within
    steps of as many requests only: with more requests there are more of both, and the table may be
    wrong about them."""

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

    def learned(self, step: int, ratio: float) -> LearnedTimes:
        """All that the steps tell.

        ratio: of measured times, contexts included, to the table's, of all steps.
        """
        for sums in self._of_shape.values():
            sums.forget(step)
        self._of_shape = {
            shape: sums for shape, sums in self._of_shape.items() if sums.num >= FORGOTTEN
        }
        base, shapes = self._base, self._of_shape
        table = np.array(base.verify)
        if not shapes:
            return LearnedTimes(ratio * table, ratio, 0.0)
        seen = _Seen.of(shapes)
        of_token, per_node = seen.fit(ratio)
        # With these the mean of the latest times stays as it is with the ratio alone.
        ratio -= of_token * seen.contexts_per_ms
        of_table = ratio - per_node * seen.nodes_per_ms
        of_parts = of_table * seen.expected + per_node * seen.nodes + of_token * seen.contexts
        # Of what each entry of the table takes, the shapes between entries have their shares.
        shares = (
            _shares(seen.num_requests, base.batch_sizes)[:, :, None]
            * _shares(seen.widths, base.widths)[:, None, :]
        ).reshape(len(of_parts), -1)
        num_latest = seen.num @ shares
        num_seen = np.array([sums.num_seen for sums in shapes.values()]) @ shares
        # Least squares. Entries that no step tells of stay as they are.
        prior = np.maximum(PRIOR_TIMES * num_latest / np.maximum(num_seen, 1e-9), LEAST_PRIOR)
        of_shapes = np.linalg.solve(
            (shares.T * seen.num) @ shares + np.diag(prior),
            shares.T @ (seen.num * (seen.measured - of_parts) / seen.expected),
        ).reshape(table.shape)
        times = of_table * table
        beside = per_node * np.outer(base.batch_sizes, np.array(base.widths) - 1)
        beside += of_shapes * table
        times += np.clip(beside, -_MOST_BESIDE * times, _MOST_BESIDE * times)
        times = _capped(times, num_latest.reshape(table.shape))
        # Nodes may take less than the table says, and none takes less than nothing.
        times = np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)
        return LearnedTimes(times, ratio, of_token)


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Steps by shape: how many of the latest, and of one of them, in the mean, what the table
    expects, what it took, and tokens of context of all its requests.

    squares, products: of contexts with themselves and with times within a shape, from their means.
    """

    num_requests: Int64
    widths: Int64
    num: Float64
    expected: Float64
    measured: Float64
    contexts: Float64
    squares: Float64
    products: Float64

    @classmethod
    def of(cls, shapes: Mapping[tuple[int, int], LatestTimes]) -> "_Seen":
        num_requests, widths = np.array(list(shapes)).T
        num, *totals, squares, products = np.array(
            [
                (sums.num, sums.x, sums.y, sums.context, *sums.contexts_centred())
                for sums in shapes.values()
            ]
        ).T
        expected, measured, contexts = (total / num for total in totals)
        return cls(num_requests, widths, num, expected, measured, contexts, squares, products)

    @property
    def nodes(self) -> Int64:
        """Beside the roots."""
        return self.num_requests * (self.widths - 1)

    @property
    def contexts_per_ms(self) -> float:
        """Tokens of context for each expected millisecond, of all steps."""
        return float(self.num @ self.contexts / (self.num @ self.expected))

    @property
    def nodes_per_ms(self) -> float:
        """Likewise."""
        return float(self.num @ self.nodes / (self.num @ self.expected))

    def fit(self, ratio: float) -> tuple[float, float]:
        """Milliseconds that each token of context, which are not negative, and each node take
        beside the table times what contexts leave of the ratio."""
        contexts_per_ms, nodes_per_ms, most = self.contexts_per_ms, self.nodes_per_ms, np.inf
        of_token, per_node = self._least_squares(ratio)
        if contexts_per_ms > 0:
            most = max(ratio - _LEAST_RATIO, 0.0) / contexts_per_ms
            # Nodes are beside a ratio without contexts, which is known only now.
            left = ratio - min(of_token, most) * contexts_per_ms
            of_token, per_node = self._least_squares(left)
        of_token = min(of_token, most)
        # Fewer nodes than one in a thousand milliseconds tell nothing.
        if nodes_per_ms <= 1e-3:
            return of_token, 0.0
        most = _MOST_BESIDE * (ratio - of_token * contexts_per_ms) / nodes_per_ms
        return of_token, min(max(per_node, -most), most)

    def _least_squares(self, ratio: float) -> tuple[float, float]:
        """Both without limits, but that contexts take no less than nothing; 0 where steps of as
        many requests do not differ in them. Errors are shares of the expected times."""
        _, batch = np.unique(self.num_requests, return_inverse=True)
        of_batch = batch == np.arange(batch.max() + 1)[:, None]
        weights = self.num / self.expected**2

        def centred(values: Float64) -> Float64:
            means: Float64 = (of_batch @ (weights * values)) / (of_batch @ weights)
            return values - means[batch]

        num = float(self.num.sum())
        left = centred(self.measured - ratio * self.expected)
        contexts, nodes = centred(self.contexts), centred(self.nodes.astype(np.float64))
        most_nodes = (of_batch * self.nodes).max(axis=1)[batch]
        both = float(weights @ (contexts * nodes))
        # Steps that were wide, or had long contexts, are forgotten; what they told is not held for
        # certain since.
        gram = np.array(
            [
                [
                    weights @ contexts**2
                    + (self.squares / self.expected**2).sum()
                    + PRIOR_TIMES * (weights @ self.contexts**2) / num,
                    both,
                ],
                [both, weights @ nodes**2 + PRIOR_TIMES * (weights @ most_nodes**2) / num],
            ]
        )
        moment = np.array(
            [
                weights @ (contexts * left) + (self.products / self.expected**2).sum(),
                weights @ (nodes * left),
            ]
        )
        gram += 1e-9 * np.eye(2)  # where there are none at all
        of_token, per_node = np.linalg.solve(gram, moment).tolist()
        if of_token < 0:
            return 0.0, float(moment[1] / gram[1, 1])
        return of_token, per_node


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
