"""What the steps of this server cost, timed while it serves.

Every rank of a tensor-parallel group has to decide alike: all take the times of rank 0, at agreed
steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sglang_hvd.allocation import CostFit, CostScale, StepAllocator, StepCosts, costs_of
from sglang_hvd.step_clock import Phase, StepClock

# Steps after which the table is made anew: soon at first, then as often as the last.
_FIRST_TABLES = (2, 4, 8, 16, 32)
_TABLE_EVERY = 64

# Before any step was timed; the first tables take its place at once.
_FIRST_COEFFICIENTS = np.array([5.0, 0.0, 0.1, 0.5, 0.0, 0.01, 0.0, 0.5, 0.02, 0.0, 0.0])

# What a step takes beside its parts, over these, at most: more was a pause, as of SGLang's
# /pause_generation, which nothing announces here.
_MOST_REST = 10.0


def before_any_step(widths: Sequence[int]) -> StepCosts:
    """A table to begin with."""
    costs = costs_of(_FIRST_COEFFICIENTS, widths)
    assert costs is not None
    return costs


class ServedCosts:
    """Times the parts of each step and keeps an allocator's table of costs up to date.

    allocator: None, as under policies that weigh no costs: nothing is timed.
    is_fixed: its table was given and stays.
    ranks: the tensor-parallel group, on the host; None: this process is alone.
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
        ranks: torch.distributed.ProcessGroup | None,
        clock: StepClock,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._allocator = allocator
        self._timer = _DeviceTimer(device, now) if allocator is not None and not is_fixed else None
        self._ranks = ranks
        self._fit: CostFit | CostScale = CostFit(widths)
        self._num_steps = 0

    def begin_with(self, costs: StepCosts) -> None:
        """A table that was timed before the first step; its steps refine it from then on. Every
        rank has to begin with the same."""
        assert self._allocator is not None, "a policy that weighs no costs"
        self._allocator.use_costs(costs)
        self._fit = CostScale(costs)

    @contextmanager
    def time_draft(self, num_requests: int, num_rounds: int) -> Iterator[None]:
        """All rounds of the model drafter."""
        with self._time(lambda ms: self._fit.observe_draft(num_requests, num_rounds, ms)):
            yield

    @contextmanager
    def time_verify(self, num_requests: int, width: int) -> Iterator[None]:
        """A verification."""
        with self._time(lambda ms: self._fit.observe_verify(num_requests, width, ms)):
            yield

    @contextmanager
    def time_extend(self, num_requests: int, width: int) -> Iterator[None]:
        """A draft-extend."""
        with self._time(lambda ms: self._fit.observe_extend(num_requests, width, ms)):
            yield

    def begin_step(self, num_requests: int) -> None:
        """A decode step begins. What the last one took beside its parts is known then, where
        nothing came between: on a GPU that it waited for the host, mostly."""
        if self._timer is not None:
            self._timer.begin_step(lambda ms: self._fit.observe_rest(num_requests, ms))

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

    def _make_table(self, timer: _DeviceTimer) -> None:
        timer.collect()
        coefficients = torch.from_numpy(self._fit.coefficients())
        if self._ranks is not None:
            torch.distributed.broadcast(coefficients, group=self._ranks, group_src=0)
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


class _Step:
    """A decode step as far as it was timed.

    began: the host's time, or the event before its first part; None before that.
    parts_ms: of its parts that are known.
    """

    def __init__(self, observe_rest: Callable[[float], None]) -> None:
        self._observe_rest = observe_rest
        self.began: Any = None
        self.parts_ms = 0.0

    def end(self, milliseconds: float) -> None:
        """It took so long, from its first part to that of the next step."""
        rest = max(milliseconds - self.parts_ms, 0.0)
        self._observe_rest(min(rest, _MOST_REST * self.parts_ms))


class _DeviceTimer:
    """Times what is launched inside `measure`, without waiting for it, and what steps take beside.

    On CUDA the time is known later, on the host at once.
    """

    def __init__(self, device: str, now: Callable[[], float]) -> None:
        self.is_cuda = device == "cuda"
        self._now = now
        self._pending: deque[tuple[Any, Any, Callable[[float], None]]] = deque()
        self._step: _Step | None = None
        self._last: _Step | None = None  # that the step follows on

    def begin_step(self, observe_rest: Callable[[float], None]) -> None:
        """A decode step begins; what it takes beside its parts is observed when the next has begun,
        unless it is interrupted before."""
        self._last, self._step = self._step, _Step(observe_rest)

    def interrupt(self) -> None:
        """The next decode step does not follow on the last."""
        self._step = None

    @contextmanager
    def measure(self, observe: Callable[[float], None]) -> Iterator[None]:
        """A part of the step, if there is one."""
        step = self._step

        def observe_part(milliseconds: float) -> None:
            if step is not None:
                step.parts_ms += milliseconds
            observe(milliseconds)

        begin, end = (self._mark() for _ in range(2))
        begin.record()
        self._see_first(begin)
        yield
        end.record()
        self._pending.append((begin, end, observe_part))
        if not self.is_cuda:
            self.collect()

    def collect(self) -> None:
        """Hands over the times that are known by now."""
        while self._pending and self._pending[0][1].query():
            begin, end, observe = self._pending.popleft()
            observe(begin.elapsed_time(end))

    def _see_first(self, begin: Any) -> None:
        """The event before a part, the step's first maybe."""
        if self._step is None or self._step.began is not None:
            return
        self._step.began = begin
        if self._last is not None and self._last.began is not None:
            self._pending.append((self._last.began, begin, self._last.end))
            self._last = None

    def _mark(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.is_cuda else _HostEvent(self._now)


class _HostEvent:
    """torch.cuda.Event on the host's clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._seconds = 0.0

    def record(self) -> None:
        self._seconds = self._now()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostEvent) -> float:
        """Milliseconds until the other."""
        return 1000 * (end._seconds - self._seconds)
