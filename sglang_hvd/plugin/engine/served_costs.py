"""What the steps of this server cost, timed while it serves.

Every rank of a tensor-parallel group has to decide alike: all take the times of rank 0, at agreed
steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sglang_hvd.allocation import CostFit, CostScale, StepAllocator, StepCosts, costs_of
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.device.timer import DeviceTimer
from sglang_hvd.step_clock import Phase, StepClock

# Steps after which the table is made anew: soon at first, then as often as the last.
_FIRST_TABLES = (2, 4, 8, 16, 32)
_TABLE_EVERY = 64

# CostFit.coefficients before any step was timed; the first tables take its place at once.
_FIRST_COEFFICIENTS = np.array(
    [
        *(5.0, 0.0, 0.1),  # a verification, in milliseconds: once, a request, a node
        *(0.5, 0.0, 0.01),  # a draft-extend, likewise
        *(0.0, 0.5, 0.02),  # a draft: once, a round, a request in a round
        *(0.0, 0.0),  # what a step takes beside these: once, a request
        *(0.0, 0.0),  # a plain one, likewise
    ]
)


def before_any_step(widths: Sequence[int]) -> StepCosts:
    """A table to begin with."""
    costs = costs_of(_FIRST_COEFFICIENTS, widths)
    assert costs is not None
    return costs


class ServedCosts:
    """Times the parts of each step and keeps an allocator's table of costs up to date.

    allocator: None, as under policies that weigh no costs: nothing is timed.
    is_fixed: the allocator's table was given and stays.
    clock: measures what this itself takes.
    now: the time of the host in seconds, to be replaced in tests.
    """

    def __init__(
        self,
        allocator: StepAllocator | None,
        *,
        is_fixed: bool,
        widths: Sequence[int],
        device: str,
        ranks: RankGroup,
        clock: StepClock,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._allocator = allocator
        self._timer = DeviceTimer(device, now) if allocator is not None and not is_fixed else None
        self._ranks = ranks
        self._widths = widths
        self._fit: CostFit | CostScale = CostFit(widths)
        self._runs_ahead = False
        self._num_steps = 0

    def run_ahead(self) -> None:
        """Before any step and begin_with: plain steps may be launched ahead of the tokens of the
        last."""
        assert isinstance(self._fit, CostFit), "the table of begin_with would be lost"
        self._runs_ahead = True
        self._fit = CostFit(self._widths, runs_ahead=True)

    def begin_with(self, costs: StepCosts) -> None:
        """Begins with a table that was timed before the first step; steps refine it from then on.
        Every rank has to begin with the same."""
        assert self._allocator is not None, "a policy that weighs no costs"
        self._allocator.use_costs(costs)
        self._fit = CostScale(costs, runs_ahead=self._runs_ahead)

    @contextmanager
    def time_draft(self, num_requests: int, num_steps: int) -> Iterator[None]:
        """Times a draft of the model drafter in so many steps."""
        with self._time(lambda ms: self._fit.observe_draft(num_requests, num_steps, ms)):
            yield

    @contextmanager
    def time_verify(self, num_requests: int, width: int, *, num_context: int) -> Iterator[None]:
        """Times a verification. num_context: tokens in the KV caches of all its requests."""

        def observe(milliseconds: float) -> None:
            self._fit.observe_verify(num_requests, width, milliseconds, num_context=num_context)

        with self._time(observe):
            yield

    @contextmanager
    def time_extend(self, num_requests: int, width: int) -> Iterator[None]:
        """Times a draft-extend."""
        with self._time(lambda ms: self._fit.observe_extend(num_requests, width, ms)):
            yield

    @contextmanager
    def time_unpriced(self) -> Iterator[None]:
        """Times what the table has no price for, so that it does not count among what steps take
        beside their parts."""
        with self._time(lambda _: None):
            yield

    def begin_step(self, num_requests: int, *, is_ahead: bool = False) -> None:
        """A decode step begins. What the last one took beside its parts is known then, where
        nothing came between: on a GPU that it waited for the host, mostly.

        is_ahead: it is launched ahead of the tokens of the last.
        """
        if self._timer is None:
            return

        def observe_rest(milliseconds: float, is_before_ahead: bool) -> None:
            self._fit.observe_rest(num_requests, milliseconds, is_before_ahead=is_before_ahead)

        self._timer.begin_step(observe_rest, is_ahead=is_ahead)

    def interrupt(self) -> None:
        """A prefill, or nothing to do: the next decode step does not follow on the last."""
        if self._timer is not None:
            self._timer.interrupt()

    def end_step(self) -> None:
        """A step was launched; brings the table up to date when it is time. All ranks call it."""
        if self._timer is None:
            return
        self._num_steps += 1
        if self._num_steps % _TABLE_EVERY and self._num_steps not in _FIRST_TABLES:
            return
        with self._clock.measure(Phase.COSTS):
            self._make_table(self._timer)

    def _make_table(self, timer: DeviceTimer) -> None:
        timer.collect()
        coefficients = self._ranks.of_first(torch.from_numpy(self._fit.coefficients()))
        costs = self._fit.table(coefficients.numpy())
        if costs is not None and self._allocator is not None:
            self._allocator.use_costs(costs)

    def describe(self) -> dict[str, Any] | None:
        """For /server_info; plain values. None without an allocator."""
        if self._allocator is None:
            return None
        return {
            "num_timed_steps": self._fit.num_observed,
            **self._allocator.costs.model_dump(mode="json"),
        }

    @contextmanager
    def _time(self, observe: Callable[[float], None]) -> Iterator[None]:
        if self._timer is None:
            yield
            return

        def observe_in_time(milliseconds: float) -> None:
            with self._clock.measure(Phase.COSTS):
                observe(milliseconds)

        with self._timer.measure(observe if self._timer.is_cuda else observe_in_time):
            yield
