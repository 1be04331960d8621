"""What a step takes beside its parts."""

import numpy as np

from sglang_hvd.allocation.latest_times import LEAST_MS, OUTLIER
from sglang_hvd.allocation.least_squares import NUM_BEFORE_OUTLIERS, LeastSquares
from sglang_hvd.costs.table import Float64, Int64

_FEWEST_RESTS = 8

# Steps that were waited for, one after the other, after which it is not known any more what one
# that is not waited for takes.
_FORGET_AHEAD = 512


class RestFit:
    """What a step of n requests takes beside its parts, a + b n. A server's first steps wait for
    what is compiled then: before there are a few times none counts, and of the first times none
    counts for much more than their median."""

    def __init__(self) -> None:
        self._fit: LeastSquares | None = None
        self._first: list[tuple[int, float]] = []

    def add(self, num_requests: int, milliseconds: float) -> None:
        """Takes in the time of a step."""
        milliseconds = max(milliseconds, 0.0)
        if self._fit is not None:
            self._fit.add(self._fit.num + 1, [1, num_requests], milliseconds)
            return
        self._first.append((num_requests, milliseconds))
        if len(self._first) == NUM_BEFORE_OUTLIERS:
            self._fit = self._of_first()

    def solve(self) -> Float64:
        """float64[2]: a and b."""
        return (self._fit or self._of_first()).solve()

    def _of_first(self) -> LeastSquares:
        # A GPU that hardly waits for the host has times near zero, whose shares say nothing.
        fit = LeastSquares((1, 100), is_relative=False)
        if len(self._first) < _FEWEST_RESTS:
            return fit
        typical_num, typical = np.median(np.array(self._first), axis=0).tolist()
        for num_requests, milliseconds in self._first:
            # More requests may take as many times as long.
            most = OUTLIER * max(typical, LEAST_MS) * max(num_requests / typical_num, 1.0)
            fit.add(fit.num + 1, [1, num_requests], min(milliseconds, most))
        return fit


class RestTimes:
    """RestFit of steps that are followed by one that waits for their tokens, and of those that are
    followed by one that is launched ahead of them: on a GPU hardly anything lies between the two.

    What is long out of date of the latter is taken for nothing. It would say that a wait costs
    nothing, so that every step waited and none told otherwise.

    runs_ahead: False: none is, and what lies between them is a part of every step.
    """

    def __init__(self, *, runs_ahead: bool) -> None:
        self._rest = RestFit()
        self._before_ahead = RestFit() if runs_ahead else None
        self._num_waited = 0  # since the last that was launched ahead

    def add(self, num_requests: int, milliseconds: float, *, is_before_ahead: bool) -> None:
        """Takes in the time of a step."""
        if not is_before_ahead:
            self._rest.add(num_requests, milliseconds)
            self._num_waited += 1
            if self._num_waited == _FORGET_AHEAD and self._before_ahead is not None:
                self._before_ahead = RestFit()
            return
        assert self._before_ahead is not None, "steps do not run ahead"
        self._before_ahead.add(num_requests, milliseconds)
        self._num_waited = 0

    def solve(self) -> Float64:
        """float64[4]: a and b of each step, then those of one before a step that waits."""
        waits = self._rest.solve()
        always = waits if self._before_ahead is None else self._before_ahead.solve()
        return np.concatenate([always, waits])


def split_rest(terms: Float64, num_requests: Int64) -> tuple[Float64, Float64]:
    """What lies behind each step, and what lies there besides where the next one waits for its
    tokens: float64[len(num_requests)] each, in milliseconds.

    terms: as RestTimes.solve has them.
    """
    always, waits = (a + b * num_requests for a, b in terms.reshape(2, 2))
    return always, np.maximum(waits - always, 0.0)
