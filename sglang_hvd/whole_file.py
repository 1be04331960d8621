"""Files that are there whole or not at all."""

import os
import tempfile
from pathlib import Path


def check_place(path: Path) -> None:
    """Raises ValueError, in one line, if no file can be written there: told before hours are spent
    on what it is to hold."""
    try:
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}")
        if path.is_dir():
            raise ValueError(f"{path} is a folder")
    except OSError as error:
        raise ValueError(f"{path}: cannot write: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"cannot write into the folder {path.parent}")


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file; one of that name stays as it is until the new one is whole.

    Raises ValueError, in one line, if it cannot be written; then nothing is left behind.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            written = Path(folder) / path.name
            written.write_bytes(content)
            os.replace(written, path)
    except OSError as error:
        raise ValueError(f"{path}: cannot write: {error.strerror}") from None
