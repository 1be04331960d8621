"""A folder of recordings that grow, follow each other and make room for each other."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from contextlib import suppress
from datetime import MAXYEAR, UTC, datetime, timedelta
from pathlib import Path

from sglang_hvd.traces import binary
from sglang_hvd.traces.held_folder import drop_left_behind
from sglang_hvd.traces.part_file import PART_SUFFIX, PartFile
from sglang_hvd.traces.trace import Trace
from sglang_hvd.traces.writer import TraceWriter

_PATTERN = f"recording-*{binary.SUFFIX}"
_STAMP = "%Y%m%dT%H%M%SZ"


def recordings(folder: Path) -> list[Path]:
    """The complete recordings of a folder, oldest first."""
    return sorted(folder.glob(_PATTERN))


def num_unfinished(folder: Path) -> int:
    """Recordings of a folder that are not complete."""
    return len(list(folder.glob(_PATTERN + PART_SUFFIX)))


def is_of_server(path: Path) -> bool:
    """Whether a file has the name of a complete recording of a server."""
    return path.match(_PATTERN)


def check_folder(folder: Path) -> None:
    """Creates the folder. Raises ValueError in a line if no file can be written or locked there."""
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
    removes what they held.

    Parts that are being written are left alone, those that cannot be completed stay as they are.
    Returns the recordings that came out of it; a part without a whole record is removed.
    """
    drop_left_behind(folder)
    salvaged = []
    for part in sorted(folder.glob(_PATTERN + PART_SUFFIX)):
        with suppress(OSError):
            path = _salvage_file(part)
            if path is not None:
                salvaged.append(path)
    return salvaged


class RecordingFolder:
    """Writes traces into one file after another. Every method may raise OSError.

    Files are named recording-<UTC time>-<process id>-<number>.hvdt, in the order in which they were
    started: where the clock went back, after the latest that is there.

    max_file_bytes: a file that reached it is completed.
    max_file_seconds: so is one of this age, so that its traces can be read.
    max_total_bytes: complete recordings and those being written, also of other processes, each of
        which counts max_file_bytes; the oldest complete ones are removed. At least twice
        max_file_bytes.
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
        """After an OSError the trace is not recorded, and those before it are kept."""
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
        # After what is there, whatever the clock said then: the oldest are removed by their names.
        started = max(datetime.now(UTC), _latest_start(self._folder) + timedelta(seconds=1))
        while True:
            stamp = started.strftime(_STAMP)
            name = f"recording-{stamp}-{os.getpid()}-{self._num_files:06d}{binary.SUFFIX}"
            self._num_files += 1
            path = self._folder / name
            # A process that began in this second may have had the same number.
            if not path.exists() and not path.with_name(name + PART_SUFFIX).exists():
                return path

    def _leave(self) -> None:
        # Its end could not be written either; it is salvaged when there is room again.
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


def _latest_start(folder: Path) -> datetime:
    """By the names of the recordings, complete or not."""
    latest = datetime.fromtimestamp(0, UTC)
    for path in folder.glob(f"{_PATTERN}*"):
        with suppress(ValueError):  # another's name
            started = datetime.strptime(path.name.split("-")[1], _STAMP).replace(tzinfo=UTC)
            if started.year < MAXYEAR:  # what follows it has a name too
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
