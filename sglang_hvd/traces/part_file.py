"""A file that stands under its own name only when it is complete."""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

PART_SUFFIX = ".part"


class PartFile:
    """Appends to `<path>.part`, which becomes `path` when complete.

    The part is locked (flock) as long as its process lives, so that others can tell a part that
    is being written from one that was left behind. Nothing is buffered: what was appended is there
    when the process is killed.

    is_left_behind: take over a part, with what it holds; else start an empty one.

    Raises BlockingIOError if it is being written already, FileNotFoundError if none was left.
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
            # Where nothing can be locked, nobody would ever salvage or remove it.
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

        FileNotFoundError: somebody moved or removed the part, and nobody would find what follows.
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
        """Gives the file its name, over one that has it already."""
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
    """Its descriptor, and whether it is new."""
    if may_create:
        with suppress(FileExistsError):
            # What users asked of the model is for the server's user alone.
            return os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), True
    return os.open(part, os.O_RDWR), False


def _is_same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
