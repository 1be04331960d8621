"""Keeps a table that was timed beforehand right by the steps that are served."""

from functools import cache

import numpy as np

from sglang_hvd.allocation.cost_fit import RestFit
from sglang_hvd.allocation.costs import Float64, StepCosts

# What the sums keep of themselves with each further time: the last few hundred count.
_KEPT = 0.998

# What a ratio begins at has the weight of so many times.
_PRIOR_TIMES = 4.0

# A time this much above what the table says tells of the machine, not of the step.
_OUTLIER = 3.0


class CostScale:
    """observe_* takes in times in milliseconds. Each part of the table, the verifications, the
    draft-extends and the drafts of the model drafter, is multiplied by what its times are over what
    the table says; as long as a part is seldom run, by what those of the verifications are, which
    every step has. What a step takes beside them is learned. Not thread-safe.
    """

    def __init__(self, base: StepCosts) -> None:
        self._base = base
        self._verify, self._extend, self._draft = _Ratio(), _Ratio(), _Ratio()
        self._rest = RestFit()
        # What the table says, once looked up: it does not change, and every step asks.
        self._verify_ms = cache(lambda num, width: float(base.verify_ms(num, [width])[0]))
        self._extend_ms = cache(lambda num, width: float(base.draft_extend_ms(num, [width])[0]))
        self._draft_ms = cache(lambda num, steps: float(base.draft_ms([num], steps)[0]))
        self.num_observed = 0

    def observe_verify(self, num_requests: int, width: int, milliseconds: float) -> None:
        """A step of the target model."""
        self.num_observed += 1
        self._verify.add(self._verify_ms(num_requests, width), milliseconds)

    def observe_extend(self, num_requests: int, width: int, milliseconds: float) -> None:
        """A draft-extend."""
        self._extend.add(self._extend_ms(num_requests, width), milliseconds)

    def observe_draft(self, num_requests: int, num_rounds: int, milliseconds: float) -> None:
        """All rounds of the model drafter in one step."""
        self._draft.add(self._draft_ms(num_requests, num_rounds + 1), milliseconds)

    def observe_rest(self, num_requests: int, milliseconds: float) -> None:
        """What a step took beside these."""
        self._rest.add(num_requests, milliseconds)

    def coefficients(self) -> Float64:
        """All that is learned, so that another process can make the same table: float64[5]."""
        verify = self._verify.value()
        ratios = [verify, self._extend.value(verify), self._draft.value(verify)]
        return np.concatenate([ratios, self._rest.solve()])

    def table(self, coefficients: Float64) -> StepCosts:
        """The base as the coefficients change it."""
        verify, extend, draft, fixed, per_request = coefficients.tolist()
        base = self._base
        rest = [fixed + per_request * n for n in base.batch_sizes]
        return StepCosts(
            about=f"{base.about}, refined by its steps",
            batch_sizes=base.batch_sizes,
            widths=base.widths,
            verify=tuple(
                tuple(time * verify + of_batch for time in row)
                for row, of_batch in zip(base.verify, rest, strict=True)
            ),
            draft_round=tuple(time * draft for time in base.draft_round),
            draft_extend=tuple(tuple(time * extend for time in row) for row in base.draft_extend),
            draft_once=None
            if base.draft_once is None
            else tuple(time * draft for time in base.draft_once),
        )


class _Ratio:
    """Of the times measured to those expected, in the latest steps."""

    def __init__(self) -> None:
        self._measured = self._expected = 0.0
        self._num = 0.0

    def add(self, expected: float, measured: float) -> None:
        if expected <= 0:
            return
        most = _OUTLIER * self.value() * expected
        self._num = _KEPT * self._num + 1
        self._measured = _KEPT * self._measured + min(measured, most)
        self._expected = _KEPT * self._expected + expected

    def value(self, before: float = 1.0) -> float:
        """before: what it is without times."""
        if self._num == 0:
            return before
        prior = _PRIOR_TIMES * self._expected / self._num
        return (self._measured + before * prior) / (self._expected + prior)
