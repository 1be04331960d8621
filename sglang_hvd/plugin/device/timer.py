"""Times what a device runs, without a wait of the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# The rest of a step is at most this many times its parts. A longer rest was a pause that nothing
# announced.
_MAX_REST = 10.0

ObserveRest = Callable[[float, bool], None]


class _Step:
    """A decode step, as far as it was timed.

    began: the event before its first part; None before that.
    parts_ms: milliseconds of its parts, as far as they are known.
    is_before_ahead: the next step was launched before this one's tokens were known.
    """

    def __init__(self, observe_rest: ObserveRest) -> None:
        self._observe_rest = observe_rest
        self.is_before_ahead = False
        self.began: Any = None
        self.parts_ms = 0.0

    def end(self, milliseconds: float) -> None:
        """Hands over the rest of the step.

        milliseconds: from its first part to the first part of the next step.
        """
        rest = max(milliseconds - self.parts_ms, 0.0)
        self._observe_rest(min(rest, _MAX_REST * self.parts_ms), self.is_before_ahead)


class DeviceTimer:
    """Times the parts of decode steps, which are launched inside `measure`, and the rest of each
    step.

    On CUDA a time is known later, on the host at once.
    """

    def __init__(self, device: str, now: Callable[[], float]) -> None:
        self.is_cuda = device == "cuda"
        self._now = now
        self._pending: deque[tuple[Any, Any, Callable[[float], None]]] = deque()
        self._step: _Step | None = None
        self._last: _Step | None = None  # the step before it

    def mark_step(self, observe_rest: ObserveRest, *, is_ahead: bool = False) -> None:
        """A decode step begins. Its rest, which is no part's, is known once the next step has
        begun, unless something comes between.

        observe_rest: gets milliseconds, and whether the next step ran ahead.
        is_ahead: the step is launched before the tokens of the last one are known.
        """
        self._last, self._step = self._step, _Step(observe_rest)
        if self._last is not None:
            self._last.is_before_ahead = is_ahead

    def interrupt(self) -> None:
        """Something comes between the last decode step and the next."""
        self._step = None

    @contextmanager
    def measure(self, observe: Callable[[float], None]) -> Iterator[None]:
        """Times a part of the step that has begun, or work outside of steps."""
        step = self._step

        def observe_part(milliseconds: float) -> None:
            if step is not None:
                step.parts_ms += milliseconds
            observe(milliseconds)

        begin, end = (self._mark() for _ in range(2))
        begin.record()
        self._note_first(begin)
        yield
        end.record()
        self._pending.append((begin, end, observe_part))
        if not self.is_cuda:
            self.collect()

    def collect(self) -> None:
        """Hands over all times that are known by now."""
        while self._pending and self._pending[0][1].query():
            begin, end, observe = self._pending.popleft()
            observe(begin.elapsed_time(end))

    def _note_first(self, begin: Any) -> None:
        """Notes the event before a part. The first part begins the step."""
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
        """Milliseconds until the other event."""
        return 1000 * (end._seconds - self._seconds)
