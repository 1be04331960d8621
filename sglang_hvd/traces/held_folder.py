"""Hidden folders in which a command holds recordings that a server may remove meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".held-"

# A folder is not locked yet when it is made: one that is younger is left alone.
_LEAST_AGE_SECONDS = 60.0


@contextlib.contextmanager
def held_folder(parent: Path) -> Iterator[Path]:
    """A folder for the time of the context. If the process is killed, drop_left_behind finds it.

    Raises OSError if it cannot be made.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix=_PREFIX)))
        # Where nothing can be locked, nobody can tell either, and all such folders stay.
        with contextlib.suppress(OSError):
            stack.enter_context(_locked(folder))
        yield folder


def drop_left_behind(parent: Path) -> None:
    """Removes the folders of processes that do not run any more."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process is faster, or nothing may be removed
            if time.time() - folder.stat().st_mtime >= _LEAST_AGE_SECONDS:
                with _locked(folder):
                    shutil.rmtree(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises OSError if another process has the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
