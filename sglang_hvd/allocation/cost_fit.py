"""Learns what steps cost from steps that were timed."""

from collections.abc import Sequence

import numpy as np

from sglang_hvd.allocation.least_squares import LeastSquares
from sglang_hvd.allocation.rest_times import RestTimes, split_rest
from sglang_hvd.costs.table import Float64, StepCosts

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


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
        self._verify = LeastSquares((10, 100, 1))
        self._extend = LeastSquares((10, 100, 1))
        self._draft = LeastSquares((10, 1, 100))
        self._rest = RestTimes(runs_ahead=runs_ahead)

    def observe_verify(
        self, num_requests: int, width: int, milliseconds: float, *, num_context: int = 0
    ) -> None:
        """Takes in the milliseconds of a step of the target model. num_context is not heeded: what
        contexts take is in the terms, of which few steps tell it badly."""
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
