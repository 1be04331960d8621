"""Folders in which commands hold recordings."""

import os
from pathlib import Path

from sglang_hvd.traces.recording_folder import held_folder, salvage


def test_a_folder_is_there_as_long_as_it_is_held(tmp_path: Path) -> None:
    with held_folder(tmp_path) as folder:
        os.utime(folder, (0, 0))
        salvage(tmp_path)
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed_but_no_new_folder(tmp_path: Path) -> None:
    old, new = tmp_path / ".held-old", tmp_path / ".held-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "recording.hvdt").write_bytes(b"text")
    os.utime(old, (0, 0))
    salvage(tmp_path)
    assert list(tmp_path.iterdir()) == [new]
