"""Writes recordings. A file gets its own name only when it is complete."""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from sglang_hvd.traces import binary
from sglang_hvd.traces.record import Header, Record, TurnTexts
from sglang_hvd.traces.trace import Trace

PART_SUFFIX = ".part"


class TraceWriter:
    """Writes traces of one model and tokenizer into a recording.

    As a context manager it completes the file at the end, and leaves nothing after an exception.
    Turns of other sessions may come between the turns of one session.

    path: ends in .hvdt.

    Raises OSError if the file system refuses. After an OSError of `write` the file can still be
    completed with the traces before it.
    """

    def __init__(self, path: Path, *, model: str = "", tokenizer_fingerprint: str = "") -> None:
        if path.suffix != binary.SUFFIX:
            raise ValueError(f"{path}: traces are written as {binary.SUFFIX}")
        self._header = Header(model, tokenizer_fingerprint)
        self._texts = TurnTexts()
        self._num_records = 0
        self._crc32 = 0
        self._file = PartFile(path)
        try:
            self._append(binary.encode_header(self._header))
        except OSError:
            self.discard()
            raise

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.close()
        except OSError:
            self.discard()
            raise

    @property
    def num_bytes(self) -> int:
        """Length of the file so far."""
        return self._file.num_bytes

    @property
    def num_records(self) -> int:
        return self._num_records

    def fits(self, trace: Trace) -> bool:
        """Whether the trace is of this file's model and tokenizer."""
        return Header(trace.model, trace.tokenizer_fingerprint) == self._header

    def write(self, trace: Trace) -> None:
        if not self.fits(trace):
            raise ValueError(
                f"{self._file.path}: a file has traces of one model and tokenizer, "
                f"{self._header}, got {Header(trace.model, trace.tokenizer_fingerprint)}"
            )
        self._append(binary.encode_record(Record.of_trace(trace, self._texts)))
        self._texts.advance(trace)
        self._num_records += 1

    def close(self) -> None:
        """Completes the file. After an OSError the caller leaves or discards it."""
        self._append(binary.encode_end(self._num_records, self._crc32))
        self._file.complete()

    def discard(self) -> None:
        """Ends writing without a file."""
        self._file.discard()

    def leave(self) -> None:
        """Ends writing without completing the file. Its part stays and can be salvaged."""
        self._file.leave()

    def _append(self, data: bytes) -> None:
        self._file.append(data)
        self._crc32 = zlib.crc32(data, self._crc32)


class PartFile:
    """Appends to `<path>.part`, which becomes `path` when complete.

    The part is locked (flock) as long as its process lives. So others can tell a part that is being
    written from one that was left behind. Nothing is buffered: what was appended stays if the
    process is killed.

    is_left_behind: take over a part with its content; otherwise start an empty one.

    Raises BlockingIOError if the part is being written, FileNotFoundError if no part was left.
    """

    def __init__(self, path: Path, *, is_left_behind: bool = False) -> None:
        self.path = path
        self.part = path.with_name(path.name + PART_SUFFIX)
        self._file, is_new = _open(self.part, may_create=not is_left_behind)
        self.num_bytes = 0
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same_file(self._file, self.part):
                raise BlockingIOError(errno.EAGAIN, "completed between opening and locking it")
            if is_left_behind:
                self.num_bytes = os.lseek(self._file, 0, os.SEEK_END)
            else:
                self.cut(0)
        except OSError as error:
            os.close(self._file)
            # On a file system without locks nobody would ever salvage or remove it.
            if is_new and not isinstance(error, BlockingIOError):
                self.part.unlink(missing_ok=True)
            raise

    def cut(self, num_bytes: int) -> None:
        """Drops all but the first num_bytes bytes."""
        os.ftruncate(self._file, num_bytes)
        os.lseek(self._file, num_bytes, os.SEEK_SET)
        self.num_bytes = num_bytes

    def append(self, data: bytes) -> None:
        """Raises OSError if it cannot be written; the part is then what it was before.

        Raises FileNotFoundError if somebody moved or removed the part: nobody would find the data.
        """
        if not _is_same_file(self._file, self.part):
            raise FileNotFoundError(errno.ENOENT, "moved or removed by others", str(self.part))
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with suppress(OSError):
                self.cut(self.num_bytes)
            raise
        self.num_bytes += len(data)

    def complete(self) -> None:
        """Gives the file its name, and replaces a file of that name."""
        os.fsync(self._file)
        os.replace(self.part, self.path)
        os.close(self._file)

    def leave(self) -> None:
        """Ends writing; the part stays as it is."""
        os.close(self._file)

    def discard(self) -> None:
        """Ends writing and removes the part."""
        try:
            self.part.unlink(missing_ok=True)
        finally:
            os.close(self._file)


def _open(part: Path, *, may_create: bool) -> tuple[int, bool]:
    """The descriptor of a part, and whether the part is new."""
    if may_create:
        with suppress(FileExistsError):
            # Only the server's user may read what users asked of the model.
            return os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), True
    return os.open(part, os.O_RDWR), False


def _is_same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
