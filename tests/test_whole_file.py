"""Files that are written whole or not at all."""

import os
from pathlib import Path

import pytest

from sglang_hvd.whole_file import write_whole


def test_a_link_stays_and_what_it_names_keeps_its_permissions(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_only_the_user_can_read_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    write_whole(path, b"new", is_private=True)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    write_whole(path, b"newer", is_private=True)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"newer", 0o640)
    write_whole(tmp_path / "public", b"new")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "public").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="not a file"):
        write_whole(pipe, b"new")
    assert pipe.is_fifo()
