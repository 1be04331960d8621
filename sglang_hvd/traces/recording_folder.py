"""A folder of recordings: a server writes one after another and removes the oldest for room."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import MAXYEAR, UTC, datetime, timedelta
from pathlib import Path

from filelock import FileLock

from sglang_hvd.traces import binary
from sglang_hvd.traces.trace import Trace
from sglang_hvd.traces.writer import PART_SUFFIX, PartFile, TraceWriter

_PATTERN = f"recording-*{binary.SUFFIX}"
_STAMP = "%Y%m%dT%H%M%SZ"

# A command holds recordings in a hidden folder, so that a server cannot remove them meanwhile.
_HELD_PREFIX = ".held-"
_LOCK = ".lock"

# A folder is not locked yet when it is made, so a younger one is left alone.
_MIN_AGE_SECONDS = 60.0


def recordings(folder: Path) -> list[Path]:
    """The complete recordings of a folder, oldest first."""
    return sorted(folder.glob(_PATTERN))


def num_unfinished(folder: Path) -> int:
    """How many recordings of a folder are not complete."""
    return len(list(folder.glob(_PATTERN + PART_SUFFIX)))


def is_of_server(path: Path) -> bool:
    """Whether a file has the name of a server's complete recording."""
    return path.match(_PATTERN)


def check_folder(folder: Path) -> None:
    """Creates the folder. Raises ValueError, in one line, if files cannot be written and locked."""
    act = "record"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            act = "lock files"  # as parts are; some network file systems cannot
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot {act} there: {error.strerror}: choose another folder"
        ) from None


def salvage(folder: Path) -> list[Path]:
    """Completes what killed processes left behind, up to the last whole record of each file, and
    removes the folders in which they held recordings.

    Parts that are being written are left alone. Parts that cannot be completed stay as they are. A
    part without a whole record is removed. Returns the recordings that were completed.
    """
    _drop_held_folders(folder)
    salvaged = []
    for part in sorted(folder.glob(_PATTERN + PART_SUFFIX)):
        with suppress(OSError):
            path = _salvage_file(part)
            if path is not None:
                salvaged.append(path)
    return salvaged


@contextmanager
def held_folder(parent: Path) -> Iterator[Path]:
    """A hidden folder for the time of the context.

    If the process is killed, `salvage` removes the folder later. Raises OSError if the folder
    cannot be made.
    """
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(dir=parent, prefix=_HELD_PREFIX)
        folder = Path(stack.enter_context(made))
        # On a file system without locks nobody can tell whether it is in use, so such folders stay.
        with suppress(OSError, NotImplementedError):
            stack.enter_context(FileLock(folder / _LOCK, blocking=False))
        yield folder


class RecordingFolder:
    """Writes traces into one file after another. Every method may raise OSError.

    Files are named recording-<UTC time>-<process id>-<number>.hvdt. Their names have the order in
    which the files were started, even if the clock went back.

    max_file_bytes: a file of this size is completed.
    max_file_seconds: a file of this age is completed too, so that its traces can be read.
    max_total_bytes: limit for the complete recordings and those being written, also by other
        processes. Each file being written counts max_file_bytes. The oldest complete recordings
        are removed to keep to the limit. At least twice max_file_bytes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_file_bytes: int,
        max_file_seconds: float,
        max_total_bytes: int,
    ) -> None:
        if max_total_bytes < 2 * max_file_bytes:
            raise ValueError(
                f"recordings of {max_total_bytes} bytes in all do not hold two files of "
                f"{max_file_bytes}: raise the one or lower the other"
            )
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._max_file_seconds = max_file_seconds
        self._max_total_bytes = max_total_bytes
        self._writer: TraceWriter | None = None
        self._started_at = 0.0
        self._num_files = 0

    def write(self, trace: Trace) -> None:
        """After an OSError the trace is not recorded, and the traces before it are kept."""
        self.complete_if_due()
        if self._writer is not None and not self._writer.fits(trace):
            self.complete()
        writer = self._writer or self._start(trace)
        try:
            writer.write(trace)
        except OSError:
            self._leave()
            raise

    def complete_if_due(self) -> None:
        """Completes the file that is being written if it is large or old enough."""
        if self._writer is not None and (
            self._writer.num_bytes >= self._max_file_bytes
            or time.monotonic() - self._started_at >= self._max_file_seconds
        ):
            self.complete()

    def complete(self) -> None:
        """Completes the file that is being written, if there is one."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except OSError:
            writer.leave()
            raise

    def _start(self, trace: Trace) -> TraceWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        salvage(self._folder)
        num_growing = 1 + num_unfinished(self._folder)
        self._make_room(self._max_total_bytes - num_growing * self._max_file_bytes)
        self._writer = TraceWriter(
            self._new_path(),
            model=trace.model,
            tokenizer_fingerprint=trace.tokenizer_fingerprint,
        )
        self._started_at = time.monotonic()
        return self._writer

    def _new_path(self) -> Path:
        # Names order the files by age, whatever the clock said: the oldest are removed by name.
        started = max(datetime.now(UTC), _latest_start(self._folder) + timedelta(seconds=1))
        while True:
            stamp = started.strftime(_STAMP)
            name = f"recording-{stamp}-{os.getpid()}-{self._num_files:06d}{binary.SUFFIX}"
            self._num_files += 1
            path = self._folder / name
            # A process that started in the same second may have had the same number.
            if not path.exists() and not path.with_name(name + PART_SUFFIX).exists():
                return path

    def _leave(self) -> None:
        # Its end could not be written either. It is salvaged when there is room again.
        writer, self._writer = self._writer, None
        assert writer is not None
        if writer.num_records:
            writer.leave()
        else:
            writer.discard()

    def _make_room(self, max_bytes: int) -> None:
        sizes: dict[Path, int] = {}
        for path in recordings(self._folder):
            with suppress(FileNotFoundError):  # another process makes room too
                sizes[path] = path.stat().st_size
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def _drop_held_folders(parent: Path) -> None:
    """Removes the held folders of processes that do not run any more."""
    for folder in parent.glob(f"{_HELD_PREFIX}*"):
        # Another process may be faster, or nothing may be removed or locked.
        with suppress(OSError, NotImplementedError):
            if time.time() - folder.stat().st_mtime >= _MIN_AGE_SECONDS:
                with FileLock(folder / _LOCK, blocking=False):
                    shutil.rmtree(folder)


def _latest_start(folder: Path) -> datetime:
    """The latest time in the names of the recordings, complete or not."""
    latest = datetime.fromtimestamp(0, UTC)
    for path in folder.glob(f"{_PATTERN}*"):
        with suppress(ValueError):  # a name of another kind
            started = datetime.strptime(path.name.split("-")[1], _STAMP).replace(tzinfo=UTC)
            if started.year < MAXYEAR:  # a second later still has a name
                latest = max(latest, started)
    return latest


def _salvage_file(part: Path) -> Path | None:
    path = part.with_name(part.name.removesuffix(PART_SUFFIX))
    file = PartFile(path, is_left_behind=True)
    try:
        with part.open("rb") as content:
            whole = binary.whole_part(content)
        if whole.num_records > 0:
            file.cut(whole.num_bytes)
            if not whole.is_ended:
                file.append(binary.encode_end(whole.num_records, whole.crc32))
            file.complete()
            return path
    except OSError:
        file.leave()
        raise
    file.discard()
    return None
