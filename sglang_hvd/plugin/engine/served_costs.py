"""Times the steps of this server and corrects the table of costs by them.

Every rank of a tensor-parallel group has to decide alike: all use the table of rank 0, from agreed
steps on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sglang_hvd.allocation import StepAllocator
from sglang_hvd.costs import LearnedCosts
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.device.timer import DeviceTimer
from sglang_hvd.step_clock import Phase, StepClock

# The table is corrected after each of these steps, then every _TABLE_EVERY steps.
_FIRST_TABLES = (2, 4, 8, 16, 32)
_TABLE_EVERY = 64


class ServedCosts:
    """Times the parts of each step and corrects an allocator's table of costs by them.

    allocator: None under policies that weigh no costs; nothing is timed then. Its first table is
        the same on every rank.
    is_fixed: the user gave the allocator's table, so it is not corrected.
    runs_ahead: steps without drafts may be launched before the tokens of the last step are known.
    clock: measures what this class itself takes.
    now: the time of the host in seconds, to be replaced in tests.
    """

    def __init__(
        self,
        allocator: StepAllocator | None,
        *,
        is_fixed: bool,
        runs_ahead: bool,
        device: str,
        ranks: RankGroup,
        clock: StepClock,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._allocator = allocator
        self._timer = DeviceTimer(device, now) if allocator is not None and not is_fixed else None
        self._ranks = ranks
        self._learned = (
            None if allocator is None else LearnedCosts(allocator.costs, runs_ahead=runs_ahead)
        )
        self._num_steps = 0

    def time_draft(self, num_requests: int, num_steps: int) -> AbstractContextManager[None]:
        """Times a draft of the model drafter in so many steps."""
        return self._time(lambda learned, ms: learned.observe_draft(num_requests, num_steps, ms))

    def time_verify(
        self, num_requests: int, width: int, *, num_context: int
    ) -> AbstractContextManager[None]:
        """Times a verification. num_context: tokens in the KV caches of all its requests."""

        def observe(learned: LearnedCosts, milliseconds: float) -> None:
            learned.observe_verify(num_requests, width, milliseconds, num_context=num_context)

        return self._time(observe)

    def time_extend(self, num_requests: int, width: int) -> AbstractContextManager[None]:
        """Times a draft-extend."""
        return self._time(lambda learned, ms: learned.observe_extend(num_requests, width, ms))

    def time_unpriced(self) -> AbstractContextManager[None]:
        """Times what the table has no price for, so that it does not count as the rest of a
        step."""
        return self._time(lambda *_: None)

    def begin_step(self, num_requests: int, *, is_ahead: bool = False) -> None:
        """A decode step begins. If it follows the last step directly, the last step's rest is known
        now: what that step took in addition to its parts. On a GPU that is mostly waiting for the
        host.

        is_ahead: it is launched before the tokens of the last step are known.
        """
        learned = self._learned
        if self._timer is None or learned is None:
            return

        def observe_rest(milliseconds: float, is_before_ahead: bool) -> None:
            learned.observe_rest(num_requests, milliseconds, is_before_ahead=is_before_ahead)

        self._timer.mark_step(observe_rest, is_ahead=is_ahead)

    def prepare(self, num_requests: int) -> None:
        """Works out what steps of so many requests cost, so that the next one finds it done. That
        takes 140 us for each number of requests that a new table has not seen."""
        if self._allocator is not None:
            with self._clock.measure(Phase.COSTS):
                self._allocator.costs_of(num_requests)

    def interrupt(self) -> None:
        """A prefill, or nothing to do: the next decode step does not follow on the last."""
        if self._timer is not None:
            self._timer.interrupt()

    def end_step(self) -> None:
        """A step was launched. Corrects the table when it is time. All ranks call it."""
        if self._timer is None or self._allocator is None or self._learned is None:
            return
        self._num_steps += 1
        if self._num_steps % _TABLE_EVERY and self._num_steps not in _FIRST_TABLES:
            return
        with self._clock.measure(Phase.COSTS):
            self._timer.collect()
            # Only the first rank's table counts, so the others need not work one out.
            table = self._ranks.of_first(self._learned.table() if self._ranks.is_first else None)
            assert table is not None, "the first rank has a table"
            self._allocator.use_costs(table)

    def describe(self) -> dict[str, Any] | None:
        """For /server_info; plain values. None without an allocator."""
        if self._allocator is None or self._learned is None:
            return None
        return {
            "num_timed_steps": self._learned.num_observed,
            **self._allocator.costs.model_dump(mode="json"),
        }

    def _time(self, observe: Callable[[LearnedCosts, float], None]) -> AbstractContextManager[None]:
        learned = self._learned
        if self._timer is None or learned is None:
            return nullcontext()

        def observe_now(milliseconds: float) -> None:
            observe(learned, milliseconds)

        def observe_on_clock(milliseconds: float) -> None:
            with self._clock.measure(Phase.COSTS):
                observe_now(milliseconds)

        return self._timer.measure(observe_now if self._timer.is_cuda else observe_on_clock)
