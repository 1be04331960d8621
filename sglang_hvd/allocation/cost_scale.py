"""Keeps a table that was timed beforehand right by the steps that are served."""

from functools import cache

import numpy as np

from sglang_hvd.allocation.part_times import TimeLine, TimeRatio
from sglang_hvd.allocation.rest_times import RestTimes, split_rest
from sglang_hvd.allocation.shape_times import ShapeTimes
from sglang_hvd.costs.table import Float64, StepCosts


class CostScale:
    """observe_* takes in times in milliseconds. The verifications are multiplied by what their
    times are over what the table says, and what they take for each token of context is added.
    Wide ones may be further off than narrow ones, as with longer contexts than the table was timed
    with, or less far, as where the device waits for the host whatever they are: what a node takes
    more is learned beside that. So is what steps of a shape take more, as where the machine was
    disturbed while it timed them, and what a step takes beside its parts.

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
        self._verify, self._shapes = TimeRatio(), ShapeTimes(base)
        self._extend, self._draft = TimeLine(), TimeLine()
        self._rest = RestTimes(runs_ahead=runs_ahead)
        # What the table says, once looked up: it does not change, and every step asks.
        self._verify_ms = cache(lambda num, width: float(base.verify_ms(num, [width])[0]))
        self._extend_ms = cache(lambda num, width: float(base.draft_extend_ms(num, [width])[0]))
        self._draft_ms = cache(lambda num, steps: float(base.draft_ms([num], steps)[0]))
        self._of_token = 0.0  # milliseconds, as the last coefficients had it
        self.num_observed = 0

    def observe_verify(
        self, num_requests: int, width: int, milliseconds: float, *, num_context: int = 0
    ) -> None:
        """Takes in the milliseconds of a step of the target model. num_context: tokens in the KV
        caches of all its requests."""
        self.num_observed += 1
        expected = self._verify_ms(num_requests, width)
        step, shape = self.num_observed, (num_requests, width)
        of_contexts = self._of_token * num_context
        counted = self._verify.add(step, shape, expected, milliseconds, of_contexts=of_contexts)
        if counted is not None:
            self._shapes.add(step, shape, expected, counted, num_context=num_context)

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
        """All that is learned, so that another process can make the same table: float64[9], and the
        times of verifications without contexts and what steps take beside their parts."""
        step = self.num_observed
        verify = self._shapes.learned(step, self._verify.value(step))
        self._of_token = verify.of_token
        parts = [
            of for part in (self._extend, self._draft) for of in part.value(step, verify.ratio)
        ]
        return np.concatenate([[verify.of_token], parts, self._rest.solve(), verify.times.ravel()])

    def _add(
        self, part: TimeLine, shape: tuple[int, int], expected: float, milliseconds: float
    ) -> None:
        step = self.num_observed
        part.add(step, shape, expected, milliseconds, before=self._verify.value(step))

    def table(self, coefficients: Float64) -> StepCosts:
        """The base as the coefficients change it."""
        [of_token], parts, of_rest, verify = np.split(coefficients, [1, 5, 9])
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
            context=float(1000 * of_token) if of_token > 0 else None,
            wait=waits,
        )
