"""Writes files that are complete or not there at all."""

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def check_place(path: Path) -> None:
    """Raises ValueError, in one line, if no file can be written there.

    Commands call it first, so that the user is told before hours are spent on the content.
    """
    try:
        parent = path.resolve().parent
        if not parent.is_dir():
            raise ValueError(f"there is no folder {parent if path.is_symlink() else path.parent}")
        if path.is_dir():
            raise ValueError(f"{path} is a folder")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is a device or a pipe, not a file")
    except OSError as error:
        raise ValueError(f"{path}: cannot write: {error.strerror}") from None
    if not os.access(parent, os.W_OK):
        raise ValueError(f"cannot write into the folder {path.parent}")


def write_whole(path: Path, content: bytes, *, is_private: bool = False) -> None:
    """Writes a file. See `replacing`."""
    with replacing(path, is_private=is_private) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """The content of a file, to be written inside. A file of that name stays as it is until the new
    one is complete and on disk.

    The new file has the permissions of the old one. A link stays, and the file that it names is
    written.

    is_private: only the user can read the file, unless it replaces one that others can read.

    Raises ValueError, in one line, if the file cannot be written. Then no file is left.
    """
    check_place(path)
    try:
        place = path.resolve()
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as folder:
            written = Path(folder) / place.name
            with written.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if place.exists():
                written.chmod(stat.S_IMODE(place.stat().st_mode))
            elif is_private:
                written.chmod(0o600)
            os.replace(written, place)
    except OSError as error:
        raise ValueError(f"{path}: cannot write: {error.strerror}") from None


def remove_leftovers(path: Path) -> None:
    """Removes the parts that killed writers of this file left. Nobody may be writing it."""
    place = path.resolve()
    with suppress(OSError):  # there is no such folder, or it is read-only
        for folder in place.parent.iterdir():
            if re.fullmatch(re.escape(f".{place.name}.") + "[a-z0-9_]{8}", folder.name):
                shutil.rmtree(folder)
