"""Learns what steps cost from steps that were timed."""

import itertools
import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation.costs import Float64, StepCosts

Int64 = npt.NDArray[np.int64]

# What the sums keep of themselves with each further time: the last few hundred count.
_KEPT = 0.998

# A time this much above what was expected says something of the machine, not of the step.
_OUTLIER = 3.0
_LEAST_REST_MS = 0.5  # an outlier is measured by at least this, or one would never grow from zero
_LEAST_SHARE = 0.1  # of the typical time, likewise; errors as shares of less would drown all others
_NUM_BEFORE_OUTLIERS = 32
_FEWEST_RESTS = 8

# Of a term's weight in the sums, what is added where it is doubted once: far less than any times
# tell, and enough to break a tie.
_TIE = 1e-9

# Steps that were waited for, one after the other, after which it is not known any more what one
# that is not waited for takes.
_FORGET_AHEAD = 512

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class RestFit:
    """What a step of n requests takes beside its parts, a + b n. A server's first steps wait for
    what is compiled then: before there are a few times none counts, and of the first times none
    counts for much more than their median."""

    def __init__(self) -> None:
        self._fit: _Fit | None = None
        self._first: list[tuple[int, float]] = []

    def add(self, num_requests: int, milliseconds: float) -> None:
        """Takes in the time of a step."""
        milliseconds = max(milliseconds, 0.0)
        if self._fit is not None:
            self._fit.add(self._fit.num + 1, [1, num_requests], milliseconds)
            return
        self._first.append((num_requests, milliseconds))
        if len(self._first) == _NUM_BEFORE_OUTLIERS:
            self._fit = self._of_first()

    def solve(self) -> Float64:
        """float64[2]: a and b."""
        return (self._fit or self._of_first()).solve()

    def _of_first(self) -> "_Fit":
        # A GPU that hardly waits for the host has times near zero, whose shares say nothing.
        fit = _Fit((1, 100), is_relative=False)
        if len(self._first) < _FEWEST_RESTS:
            return fit
        typical_num, typical = np.median(np.array(self._first), axis=0).tolist()
        for num_requests, milliseconds in self._first:
            # More requests may take as many times as long.
            most = _OUTLIER * max(typical, _LEAST_REST_MS) * max(num_requests / typical_num, 1.0)
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


class CostFit:
    """observe_* takes in times in milliseconds; costs is the table that they make.

    A verification and a draft-extend of n requests, w nodes each, take a + b n + c n w, r rounds of
    the model drafter for n requests a + r (b + c n), what a step takes beside all these a + b n,
    none of the terms negative: smooth, and never less for more. Where the times cannot separate two
    terms, the tie is broken so that something new gets tried: with one width seen, all time goes to
    the nodes (narrower steps look cheap); with one number of rounds, to the rounds; with one number
    of requests, to what does not depend on it. Not thread-safe.
    """

    def __init__(self, widths: Sequence[int], *, runs_ahead: bool = False) -> None:
        """
        widths: that steps verify.
        runs_ahead: see RestTimes.
        """
        self._widths = tuple(widths)
        self._verify = _Fit((10, 100, 1))
        self._extend = _Fit((10, 100, 1))
        self._draft = _Fit((10, 1, 100))
        self._rest = RestTimes(runs_ahead=runs_ahead)

    def observe_verify(self, num_requests: int, width: int, milliseconds: float) -> None:
        """Takes in the milliseconds of a step of the target model."""
        step = self._verify.num + 1
        self._verify.add(step, [1, num_requests, num_requests * width], milliseconds)

    def observe_extend(self, num_requests: int, width: int, milliseconds: float) -> None:
        """Takes in the milliseconds of a draft-extend."""
        step = self._verify.num
        self._extend.add(step, [1, num_requests, num_requests * width], milliseconds)

    def observe_draft(self, num_requests: int, num_steps: int, milliseconds: float) -> None:
        """Takes in the milliseconds of a draft of the model drafter, one round less than steps."""
        num_rounds = num_steps - 1
        step = self._verify.num
        self._draft.add(step, [1, num_rounds, num_rounds * num_requests], milliseconds)

    def observe_rest(
        self, num_requests: int, milliseconds: float, *, is_before_ahead: bool = False
    ) -> None:
        """Takes in the milliseconds that a step took beside these: scheduling, planning,
        sampling. is_before_ahead: the next step was launched ahead of its tokens."""
        self._rest.add(num_requests, milliseconds, is_before_ahead=is_before_ahead)

    @property
    def num_observed(self) -> int:
        """Number of verifications that were timed."""
        return self._verify.num

    def coefficients(self) -> Float64:
        """All terms, so that another process can make the same table: float64[13]."""
        fits = (self._verify, self._extend, self._draft)
        return np.concatenate([*(fit.solve() for fit in fits), self._rest.solve()])

    def table(self, coefficients: Float64) -> StepCosts | None:
        """What coefficients, of this or of another process, make; None as long as no verification
        was timed."""
        return costs_of(coefficients, self._widths)


def costs_of(coefficients: Float64, widths: Sequence[int]) -> StepCosts | None:
    """The table of CostFit.coefficients; None as long as no verification was timed.

    widths: that steps verify.
    """
    verify, extend, draft, rest = np.split(coefficients, [3, 6, 9])
    if not verify.any():
        return None
    columns = sorted({1, 2, *widths})

    def table(terms: Float64) -> Float64:
        return np.array([[terms @ [1, n, n * w] for w in columns] for n in _BATCH_SIZES])

    rest, wait = split_rest(rest, np.array(_BATCH_SIZES))
    steps = table(verify) + rest[:, None]  # each step has it once, as it has a verification
    return StepCosts(
        about="learned from the steps of this server",
        batch_sizes=_BATCH_SIZES,
        widths=tuple(columns),
        verify=tuple(map(tuple, steps.tolist())),
        draft_round=tuple(float(draft @ [0, 1, n]) for n in _BATCH_SIZES),
        draft_extend=tuple(map(tuple, table(extend).tolist())),
        draft_once=(float(draft[0]),) * len(_BATCH_SIZES),
        wait=tuple(wait.tolist()) if wait.any() else None,
    )


class _Fit:
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
        """step: the number of steps so far, of any kind: they make earlier times count less."""
        if self.num % _NUM_BEFORE_OUTLIERS == 0:
            self._terms = self.solve().tolist()
        least = _LEAST_REST_MS
        if self._is_relative:
            least = max(_LEAST_SHARE * self._typical, 1e-6)
        expected = milliseconds
        if self.num >= _NUM_BEFORE_OUTLIERS:
            expected = sum(map(operator.mul, self._terms, factors))
            milliseconds = min(milliseconds, _OUTLIER * max(expected, least))
        self.num += 1
        self._typical += (milliseconds - self._typical) * max(1 / self.num, 1 - _KEPT)
        scale = max(expected, least) if self._is_relative else 1.0
        row = [of_term / scale for of_term in factors]
        target = milliseconds / scale
        kept = _KEPT ** (step - self._step)
        self._step = step
        for i, share in enumerate(row):
            self._moment[i] = kept * self._moment[i] + share * target
            of_term = self._gram[i]
            for j, other in enumerate(row):
                of_term[j] = kept * of_term[j] + share * other

    def solve(self) -> Float64:
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
