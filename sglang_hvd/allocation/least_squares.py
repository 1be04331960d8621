"""Least squares without negative terms."""

import itertools
import operator
from collections.abc import Sequence

import numpy as np

from sglang_hvd.allocation.latest_times import KEPT, LEAST_MS, OUTLIER
from sglang_hvd.costs.table import Float64

# Of an expected time that errors are shares of, in typical ones: errors as shares of less would
# drown all others.
_LEAST_SHARE = 0.1

# Times before which none is taken for an outlier.
NUM_BEFORE_OUTLIERS = 32

# Of a term's weight in the sums, what is added where it is doubted once: far less than any times
# tell, and enough to break a tie.
_TIE = 1e-9


class LeastSquares:
    """Least squares without negative terms, of the latest times.

    doubts: one for each term; where the times cannot separate two terms, their shares are as the
        squares of the other's doubts, whatever the size of their factors.
    is_relative: errors are shares of the expected time: a wide step that takes long is not more
        exact than a narrow one. (As shares of the measured ones, short times would count more.)
    """

    def __init__(self, doubts: Sequence[float], *, is_relative: bool = True) -> None:
        num_terms = len(doubts)
        self._is_relative = is_relative
        self._doubts = np.square(np.asarray(doubts, np.float64))
        self.num = self._step = 0
        self._typical = 0.0  # time
        # Lists: every step adds, and for so few numbers an array takes longer.
        self._gram = [[0.0] * num_terms for _ in doubts]
        self._moment = [0.0] * num_terms
        self._terms = [0.0] * num_terms

    def add(self, step: int, factors: Sequence[float], milliseconds: float) -> None:
        """Takes in a time that is the sum of the terms times these factors.

        step: the number of steps so far, of any kind: they make earlier times count less.
        """
        if self.num % NUM_BEFORE_OUTLIERS == 0:
            self._terms = self.solve().tolist()
        least = LEAST_MS
        if self._is_relative:
            least = max(_LEAST_SHARE * self._typical, 1e-6)
        expected = milliseconds
        if self.num >= NUM_BEFORE_OUTLIERS:
            expected = sum(map(operator.mul, self._terms, factors))
            milliseconds = min(milliseconds, OUTLIER * max(expected, least))
        self.num += 1
        self._typical += (milliseconds - self._typical) * max(1 / self.num, 1 - KEPT)
        scale = max(expected, least) if self._is_relative else 1.0
        row = [of_term / scale for of_term in factors]
        target = milliseconds / scale
        kept = KEPT ** (step - self._step)
        self._step = step
        for i, share in enumerate(row):
            self._moment[i] = kept * self._moment[i] + share * target
            of_term = self._gram[i]
            for j, other in enumerate(row):
                of_term[j] = kept * of_term[j] + share * other

    def solve(self) -> Float64:
        """The terms: float64[len(doubts)], without times 0."""
        if self.num == 0:
            return np.zeros(len(self._moment))
        gram, moment = np.array(self._gram), np.array(self._moment)
        weights = np.diag(gram)
        # A term that no time had is none, but must not make the others insoluble.
        gram += np.diag(np.where(weights > 0, _TIE * self._doubts * weights, 1.0))
        best, best_loss = np.zeros(len(moment)), 0.0
        for size in range(1, len(moment) + 1):
            for chosen in map(list, itertools.combinations(range(len(moment)), size)):
                terms = np.zeros(len(moment))
                terms[chosen] = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
                loss = float(terms @ gram @ terms - 2 * moment @ terms)
                if (terms >= 0).all() and loss < best_loss:
                    best, best_loss = terms, loss
        return best
