"""Recordings follow each other, make room for each other, and outlive a killed process."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sglang_hvd.traces import binary
from sglang_hvd.traces.reader import read_traces
from sglang_hvd.traces.recording_folder import (
    RecordingFolder,
    check_folder,
    recordings,
    salvage,
)
from tests.traces.made_up import trace


def open_folder(
    path: Path, *, file: int = 1 << 20, total: int = 1 << 30, seconds: float = 1000
) -> RecordingFolder:
    return RecordingFolder(
        path, max_file_bytes=file, max_total_bytes=total, max_file_seconds=seconds
    )


def tokens(number: int) -> list[int]:
    """Ten thousand tokens that do not compress to less than 20,000 bytes."""
    return np.random.default_rng(number).integers(0, 2**31 - 1, 10_000).tolist()


def outputs(folder: Path) -> list[int]:
    """First output token of every trace in the folder."""
    return [int(one.output_ids[0]) for path in recordings(folder) for one in read_traces(path)]


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.part"))


def test_a_file_that_is_large_enough_is_followed_by_another(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, file=60_000)
    for number in range(10):
        folder.write(trace(tokens(number), [number], session=str(number)))
    assert len(parts(tmp_path)) == 1
    folder.complete()
    assert parts(tmp_path) == []
    sizes = [path.stat().st_size for path in recordings(tmp_path)]
    assert all(60_000 <= size < 120_000 for size in sizes[:-1])
    assert len(sizes) == 5
    assert outputs(tmp_path) == list(range(10))


def test_a_session_goes_on_in_the_next_file(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, file=60_000)
    prompt: list[int] = []
    for turn in range(4):
        prompt = prompt + tokens(turn)
        folder.write(trace(prompt, [turn], turn=turn))
    folder.complete()
    assert len(recordings(tmp_path)) > 1
    read = [one for path in recordings(tmp_path) for one in read_traces(path)]
    assert read[-1].prompt_ids.tolist() == prompt


def test_a_file_that_is_old_enough_is_completed(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, seconds=0)
    folder.write(trace([1], [1]))
    assert recordings(tmp_path) == []
    folder.complete_if_due()
    assert outputs(tmp_path) == [1]


def test_each_model_has_its_own_file(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for number, model in enumerate(["a", "a", "b"]):
        folder.write(trace([1], [number], model=model))
    folder.complete()
    assert len(recordings(tmp_path)) == 2
    assert outputs(tmp_path) == [0, 1, 2]


def test_the_oldest_recordings_make_room(tmp_path: Path) -> None:
    (tmp_path / "another.hvdt").write_bytes(bytes(500_000))
    old = tmp_path / "recording-20200101T000000Z-1-000000.hvdt"
    old.write_bytes(bytes(100_000))
    folder = open_folder(tmp_path, file=50_000, total=200_000)
    for number in range(20):
        folder.write(trace(tokens(number), [number], session=str(number)))
        sizes = [path.stat().st_size for path in tmp_path.glob("recording-*")]
        assert sum(sizes) <= 200_000 + 50_000  # one record more than a file may have
    folder.complete()
    assert not old.exists()
    assert (tmp_path / "another.hvdt").exists()
    assert outputs(tmp_path)[-1] == 19
    assert outputs(tmp_path)[0] > 10


def test_room_is_left_for_what_other_processes_write(tmp_path: Path) -> None:
    old = tmp_path / "recording-20200101T000000Z-1-000000.hvdt"
    old.write_bytes(bytes(100_000))
    folders = [open_folder(tmp_path, file=50_000, total=200_000) for _ in range(3)]
    for number, folder in enumerate(folders):
        assert old.exists() == (number <= 2)
        folder.write(trace([1], [number], session=str(number)))
    # All three may still grow to their 50,000 bytes.
    assert len(parts(tmp_path)) == 3
    assert not old.exists()


def test_a_clock_that_ran_ahead_does_not_keep_its_recordings(tmp_path: Path) -> None:
    ahead = open_folder(tmp_path, file=50_000, total=150_000)
    ahead.write(trace(tokens(0), [0], session="0"))
    ahead.complete()
    [path] = recordings(tmp_path)
    path.rename(tmp_path / "recording-20991231T235959Z-1-000000.hvdt")
    for others in ("of others.hvdt.part", "99991231T235959Z-1-000000.hvdt.part"):
        (tmp_path / f"recording-{others}").touch()
    folder = open_folder(tmp_path, file=50_000, total=150_000)
    for number in range(1, 6):
        folder.write(trace(tokens(number), [number], session=str(number)))
        folder.complete()
    found = outputs(tmp_path)
    assert len(found) > 1
    assert found == list(range(6 - len(found), 6))


def test_a_total_that_does_not_hold_two_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not hold two files of 60: raise the one"):
        open_folder(tmp_path, file=60, total=100)


WRITE_AND_BE_KILLED = """
import os, signal, sys
from pathlib import Path
from sglang_hvd.traces.recording_folder import RecordingFolder
from tests.traces.made_up import trace
folder = RecordingFolder(
    Path(sys.argv[1]), max_file_bytes=1 << 20, max_total_bytes=1 << 30, max_file_seconds=1000
)
for number in range(3):
    folder.write(trace([1, 2, number], [number], session=str(number)))
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
print("written", flush=True)
sys.stdin.read()
"""


def another_process(folder: Path, then: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", WRITE_AND_BE_KILLED, str(folder), then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )


def test_what_a_killed_process_wrote_is_salvaged(tmp_path: Path) -> None:
    with another_process(tmp_path, "kill") as process:
        assert process.wait(60) == -9
    [part] = parts(tmp_path)
    with pytest.raises(ValueError, match="the recording is cut off here"):
        list(read_traces(part))
    assert salvage(tmp_path) == recordings(tmp_path)
    assert outputs(tmp_path) == [0, 1, 2]
    assert parts(tmp_path) == []
    assert salvage(tmp_path) == []


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    with another_process(tmp_path, "live") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        [part] = parts(tmp_path)
        content = part.read_bytes()
        assert salvage(tmp_path) == []
        folder = open_folder(tmp_path)
        folder.write(trace([1], [9]))
        folder.complete()
        assert part.read_bytes() == content
        assert outputs(tmp_path) == [9]
        process.kill()
    assert len(salvage(tmp_path)) == 1
    assert sorted(outputs(tmp_path)) == [0, 1, 2, 9]


def left_behind(folder: Path) -> tuple[Path, bytes]:
    """A part of three records that nobody writes any more."""
    writing = open_folder(folder)
    for number in range(3):
        writing.write(trace([number], [number], session=str(number)))
    [part] = parts(folder)
    content = part.read_bytes()
    writing.complete()
    for path in recordings(folder):
        path.unlink()
    return part, content


def test_a_part_is_cut_at_its_last_whole_record_wherever_it_ends(tmp_path: Path) -> None:
    part, content = left_behind(tmp_path)
    found = []
    for length in range(len(content) + 1):
        part.write_bytes(content[:length])
        num_salvaged = len(salvage(tmp_path))
        found.append(outputs(tmp_path))
        assert num_salvaged == bool(found[-1])
        assert parts(tmp_path) == []
        for path in recordings(tmp_path):
            path.unlink()
    assert found == sorted(found)
    assert {len(numbers) for numbers in found} == {0, 1, 2, 3}
    assert found[-1] == [0, 1, 2]
    assert found[-2] == [0, 1]


@pytest.mark.parametrize("tail", [bytes(5000), b"\xff" * 5000, binary.encode_end(3, 0)[:-1]])
def test_what_is_no_record_behind_the_last_one_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    part, content = left_behind(tmp_path)
    part.write_bytes(content + tail)
    salvage(tmp_path)
    assert outputs(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("fails_at", ["binary.whole_part", "Path.unlink"])
def test_a_part_that_could_not_be_read_or_removed_is_salvaged_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    """Its lock, which the same process holds, must not outlive the attempt."""
    part, content = left_behind(tmp_path)
    part.write_bytes(content if fails_at == "binary.whole_part" else b"")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "made up")

    where, name = fails_at.split(".")
    with monkeypatch.context() as broken:
        broken.setattr({"binary": binary, "Path": Path}[where], name, fail)
        assert salvage(tmp_path) == []
    assert parts(tmp_path) == [part]
    salvage(tmp_path)
    assert parts(tmp_path) == []
    assert outputs(tmp_path) == ([0, 1, 2] if fails_at == "binary.whole_part" else [])


def test_a_part_that_was_killed_between_its_end_and_its_name_gets_its_name(
    tmp_path: Path,
) -> None:
    writing = open_folder(tmp_path)
    writing.write(trace([1], [7]))
    writing.complete()
    [path] = recordings(tmp_path)
    path.rename(path.with_name(path.name + ".part"))
    assert salvage(tmp_path) == [path]
    assert outputs(tmp_path) == [7]


def test_a_folder_is_made_and_one_that_cannot_be_is_refused(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: cannot record there: File exists"):
        check_folder(tmp_path / "file")
    with pytest.raises(ValueError, match="folder: cannot record there: Not a directory"):
        check_folder(tmp_path / "file" / "folder")


def test_a_folder_in_which_nothing_can_be_locked_is_refused_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that nobody can lock nobody would remove either, and each takes the room of a file."""
    folder = open_folder(tmp_path, file=60_000, total=200_000)
    folder.write(trace([1], [7]))
    folder.complete()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(ValueError, match="cannot lock files there: No locks available"):
        check_folder(tmp_path)
    for _ in range(5):
        with pytest.raises(OSError, match="No locks available"):
            folder.write(trace([1], [8]))
    assert parts(tmp_path) == []
    assert outputs(tmp_path) == [7]
