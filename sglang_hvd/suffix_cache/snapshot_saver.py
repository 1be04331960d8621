"""Writes snapshots of a cache in a thread, while the cache goes on."""

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sglang_hvd.suffix_cache.cache import SuffixCache
from sglang_hvd.suffix_cache.outputs import SharedOutputs
from sglang_hvd.suffix_cache.snapshot import write_snapshot

logger = logging.getLogger(__name__)

# SGLang gives a scheduler 15 seconds to end.
_CLOSE_SECONDS = 12.0


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """The latest snapshot, and the latest error, which is None after a snapshot that was written.

    num_done: snapshots that were asked for, and were written or failed.
    saved_at: in seconds since 1970.
    """

    num_done: int = 0
    path: str | None = None
    saved_at: int | None = None
    seconds: float | None = None
    num_tokens: int | None = None
    last_error: str | None = None


class SnapshotSaver:
    """Writes snapshots of one cache, one after the other.

    fingerprint: of the tokenizer.
    path: of the snapshots that nobody asks for: every so many minutes, and at the end. None: there
        are none.
    """

    def __init__(
        self,
        cache: SuffixCache,
        fingerprint: str,
        path: Path | None,
        *,
        every_minutes: float | None,
    ) -> None:
        self._cache, self._fingerprint, self._path = cache, fingerprint, path
        self._every_s = None if every_minutes is None else 60 * every_minutes
        # A handler of a signal may interrupt its put.
        self._asked: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._num_asked = 0
        self._saved = SavedSnapshot()
        self._thread = threading.Thread(target=self._work, name="hvd-snapshots", daemon=True)
        self._thread.start()

    def ask(self, path: Path) -> None:
        """Asks for a snapshot, and returns at once."""
        self._num_asked += 1
        self._asked.put(path)

    def describe(self) -> dict[str, Any]:
        """The latest snapshot, and how many were asked for; plain values."""
        return {"num_asked": self._num_asked, **asdict(self._saved)}

    def close(self) -> None:
        """Writes the snapshot of `path`, and ends the thread. May be called again."""
        if not self._thread.is_alive():
            return
        if self._path is not None:
            self.ask(self._path)
        self._asked.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("HVD: the last snapshot took too long, and the one before it stays")

    def _work(self) -> None:
        while True:
            try:
                path = self._asked.get(timeout=self._every_s)
                is_asked = True
            except queue.Empty:
                path, is_asked = self._path, False
            if path is None:
                return
            saved = self._save(path)
            self._saved = replace(saved, num_done=self._saved.num_done + is_asked)

    def _save(self, path: Path) -> SavedSnapshot:
        num_tokens, start = 0, time.monotonic()

        def counted() -> Iterator[SharedOutputs]:
            nonlocal num_tokens
            for piece in self._cache.shared_outputs():
                num_tokens += len(piece.token_ids)
                yield piece

        try:
            write_snapshot(path, counted(), fingerprint=self._fingerprint)
        except ValueError as error:
            fault = str(error)
        except Exception as error:  # the thread goes on, and the caller is told
            logger.exception("HVD: snapshot %s", path)
            fault = f"{path}: {type(error).__name__}: {error}"
        else:
            seconds = round(time.monotonic() - start, 3)
            logger.info("HVD: %d tokens in snapshot %s after %.3f s", num_tokens, path, seconds)
            return SavedSnapshot(
                path=str(path), saved_at=int(time.time()), seconds=seconds, num_tokens=num_tokens
            )
        logger.warning("HVD: no snapshot: %s", fault)
        return replace(self._saved, last_error=fault)
