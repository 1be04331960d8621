"""Records what a server generates on a separate thread, so that serving never waits for it."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sglang_hvd.traces.recording_folder import RecordingFolder, salvage
from sglang_hvd.traces.session_finder import SessionFinder
from sglang_hvd.traces.trace import Trace

logger = logging.getLogger(__name__)


# A trace counts this many tokens in addition to its own: its objects take about a kilobyte.
_TRACE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class RecorderStats:
    """What became of the traces so far.

    num_dropped: traces not recorded, because the queue was full or the file system refused.
    last_error: the latest reason for a drop; None: no trace was dropped.
    """

    num_recorded: int
    num_dropped: int
    last_error: str | None


class Recorder:
    """Writes traces into a folder on a thread of its own.

    `record` only holds a lock for a moment. Traces that the thread cannot keep up with, or cannot
    write, are dropped and counted. It tries to write again after a while. The log has a line when
    recording begins to fail and one when it recovers.

    A trace whose session is "" gets the session that it continues, among those of its namespace.

    with_prompts: whether to record prompts. Sessions are found in either case.
    max_queued_tokens: tokens of the traces that wait to be written, plus 256 for each trace. The
        default takes 64 MiB.
    retry_seconds: how long traces are dropped after the file system refused one.

    The other arguments are those of RecordingFolder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_file_bytes: int = 64 << 20,
        max_total_bytes: int = 1 << 30,
        max_file_seconds: float = 3600,
        with_prompts: bool = True,
        max_queued_tokens: int = 1 << 24,
        retry_seconds: float = 30,
    ) -> None:
        self._path = folder
        self._folder = RecordingFolder(
            folder,
            max_file_bytes=max_file_bytes,
            max_file_seconds=max_file_seconds,
            max_total_bytes=max_total_bytes,
        )
        # Names must differ from those of other servers that record into the same folder.
        self._sessions = SessionFinder(f"{secrets.token_hex(6)}-")
        self._with_prompts = with_prompts
        self._max_queued_tokens = max_queued_tokens
        self._retry_seconds = retry_seconds
        self._retry_at: float | None = None  # None: the last write succeeded
        self._is_overflowing = False
        self._num_told = 0  # overflows that the log has reported
        self._idle_seconds = min(60.0, max_file_seconds)

        self._changed = threading.Condition()  # guards what follows
        self._queue: deque[Trace] = deque()
        self._num_queued_tokens = 0
        self._closed_by: str | None = None  # why it accepts no more traces
        self._num_recorded = 0
        self._num_dropped = 0
        self._num_overflowed = 0
        self._last_error: str | None = None

        self._thread = threading.Thread(target=self._run, name="hvd-recorder", daemon=True)
        self._thread.start()

    def record(self, trace: Trace) -> None:
        """Queues a finished request. Its arrays must not change any more."""
        num_tokens = _queued_tokens(trace)
        with self._changed:
            is_full = self._num_queued_tokens + num_tokens > self._max_queued_tokens
            if self._closed_by or (is_full and self._queue):
                self._num_dropped += 1
                self._num_overflowed += not self._closed_by
                self._last_error = self._closed_by or "the queue is full"
                return
            self._queue.append(trace)
            self._num_queued_tokens += num_tokens
            self._changed.notify()

    def stats(self) -> RecorderStats:
        with self._changed:
            return RecorderStats(self._num_recorded, self._num_dropped, self._last_error)

    def close(self, timeout_s: float = 30) -> None:
        """Writes what is queued and completes the file. Later traces are dropped."""
        with self._changed:
            self._closed_by = self._closed_by or "closed"
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            salvage(self._path)
            while (entries := self._next()) is not None:
                for trace in entries:
                    self._write_or_drop(trace)
                self._attempt(self._folder.complete_if_due)
                self._tell_of_overflow()
            self._attempt(self._folder.complete)
        except BaseException as error:  # stats() tell of it, whatever it is; then it is raised
            with self._changed:
                self._closed_by = self._last_error = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self._changed:
                # Without its thread the queue would only grow. After close it is empty.
                self._num_dropped += len(self._queue)
                self._queue.clear()
                self._num_queued_tokens = 0

    def _next(self) -> list[Trace] | None:
        """The next trace; empty after an idle period; None once closed and all are written."""
        with self._changed:
            if not self._queue and not self._closed_by:
                self._changed.wait(self._idle_seconds)
            if not self._queue:
                return None if self._closed_by else []
            trace = self._queue.popleft()
            self._num_queued_tokens -= _queued_tokens(trace)
            return [trace]

    def _write_or_drop(self, trace: Trace) -> None:
        try:
            self._write(trace)
        except Exception as error:  # one trace must not end the recording of all others
            logger.exception("recording in %s leaves out a request", self._path)
            with self._changed:
                self._num_dropped += 1
                self._last_error = f"{type(error).__name__}: {error}"

    def _write(self, trace: Trace) -> None:
        if not trace.session:
            session, turn = self._sessions.place(
                trace.prompt_ids, trace.output_ids, namespace=trace.namespace
            )
            trace = replace(trace, session=session, turn=turn)
        if not self._with_prompts:
            trace = replace(trace, prompt_ids=np.empty(0, np.int32), has_prompt=False)
        is_written = self._attempt(lambda: self._folder.write(trace))
        with self._changed:
            self._num_recorded += is_written
            self._num_dropped += not is_written
        if is_written and self._retry_at is not None:
            self._retry_at = None
            logger.warning("recording in %s goes on", self._path)

    def _attempt(self, act: Callable[[], None]) -> bool:
        """Acts, unless it waits to try again. Returns whether the act succeeded."""
        if self._retry_at is not None and time.monotonic() < self._retry_at:
            return False
        try:
            act()
        except OSError as error:
            reason = error.strerror or str(error)
            with self._changed:
                self._last_error = reason
            if self._retry_at is None:
                logger.warning(
                    "recording in %s fails, serving goes on: %s; tried again every %g s",
                    *(self._path, reason, self._retry_seconds),
                )
            self._retry_at = time.monotonic() + self._retry_seconds
            return False
        return True

    def _tell_of_overflow(self) -> None:
        with self._changed:
            num_new = self._num_overflowed - self._num_told
            is_over = not self._queue
        if num_new and not self._is_overflowing:
            self._is_overflowing = True
            logger.warning("recording in %s is too slow and leaves out requests", self._path)
        elif self._is_overflowing and is_over:
            self._is_overflowing = False
            self._num_told += num_new
            logger.warning("recording in %s keeps up again, %d left out", self._path, num_new)


def _queued_tokens(trace: Trace) -> int:
    return _TRACE_TOKENS + len(trace.prompt_ids) + len(trace.output_ids)
