"""The recorder never stands in the way: what it cannot keep it drops, counts, and says once."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hvd.traces import recorder as recorder_module
from sglang_hvd.traces.reader import read_traces
from sglang_hvd.traces.recorder import Recorder, RecorderStats
from sglang_hvd.traces.recording_folder import recordings
from sglang_hvd.traces.trace import Trace
from tests.traces.made_up import trace, values_of


def recorded(folder: Path) -> list[Trace]:
    return [one for path in recordings(folder) for one in read_traces(path)]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "new" / "folder")
    traces = [trace([1, number], [number], session=str(number)) for number in range(50)]
    for one in traces:
        recorder.record(one)
    recorder.close()
    assert recorder.stats() == RecorderStats(50, 0, None)
    assert values_of(recorded(tmp_path / "new" / "folder")) == values_of(traces)


def test_sessions_are_found_within_their_namespace(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for prompt, namespace in (([1], "a"), ([1, 2, 3], "b"), ([1, 2, 3], "a")):
        recorder.record(trace(prompt, [2], session="", namespace=namespace))
    recorder.close()
    first, other, second = recorded(tmp_path)
    assert first.session == second.session != other.session
    assert [one.turn for one in (first, other, second)] == [0, 0, 1]


def test_two_recorders_give_sessions_different_names(tmp_path: Path) -> None:
    for _ in range(2):
        recorder = Recorder(tmp_path)
        recorder.record(trace([1], [2], session=""))
        recorder.close()
    assert len({one.session for one in recorded(tmp_path)}) == 2


def test_prompts_can_be_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, with_prompts=False)
    recorder.record(trace([1], [2], session=""))
    recorder.record(trace([1, 2, 3], [4], session=""))
    recorder.close()
    read = recorded(tmp_path)
    assert [one.has_prompt for one in read] == [False, False]
    assert [one.prompt_ids.tolist() for one in read] == [[], []]
    assert [one.output_ids.tolist() for one in read] == [[2], [4]]
    assert [one.turn for one in read] == [0, 1]
    assert len({one.session for one in read}) == 1


# Of a trace of ten tokens.
QUEUED = 10 + recorder_module._TRACE_TOKENS


def test_a_full_queue_drops_and_counts_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, max_queued_tokens=10 * QUEUED)
    with recorder._changed:  # the thread cannot take from the queue
        for number in range(60):
            recorder.record(trace([1] * 9, [number]))
    recorder.close()
    stats = recorder.stats()
    assert (stats.num_recorded, stats.num_dropped) == (10, 50)
    assert stats.last_error == "the queue is full"
    assert [one.output_ids.tolist() for one in recorded(tmp_path)] == [[i] for i in range(10)]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "is too slow and leaves out requests" in messages[0]
    assert "keeps up again, 50 left out" in messages[1]


def test_what_is_written_leaves_its_room_in_the_queue(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, max_queued_tokens=10 * QUEUED)
    for number in range(20):  # one at a time
        recorder.record(trace([1] * 9, [number]))
        wait_for(lambda num=number: recorder.stats().num_recorded == num + 1)
    with recorder._changed:
        for number in range(2):
            recorder.record(trace([1] * 9, [number]))
    recorder.close()
    assert recorder.stats() == RecorderStats(22, 0, None)


def test_a_thread_that_ends_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()

    def breaks(folder: Path) -> None:
        has_begun.set()
        may_go_on.wait(60)
        raise MemoryError("no room")

    monkeypatch.setattr(recorder_module, "salvage", breaks)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    recorder = Recorder(tmp_path)
    assert has_begun.wait(60)
    for number in range(3):  # they wait
        recorder.record(trace([1], [number]))
    may_go_on.set()
    recorder._thread.join()
    assert recorder.stats() == RecorderStats(0, 3, "MemoryError: no room")
    recorder.record(trace([1], [2]))
    assert recorder.stats() == RecorderStats(0, 4, "MemoryError: no room")


def test_a_request_larger_than_the_queue_is_recorded_when_nothing_waits(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, max_queued_tokens=10)
    recorder.record(trace([1] * 1000, [2]))
    recorder.close()
    assert len(recorded(tmp_path)) == 1


def test_a_folder_that_is_gone_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.write_text("no folder")
    recorder = Recorder(folder, retry_seconds=0)
    for number in range(5):
        recorder.record(trace([1], [number]))
    wait_for(lambda: recorder.stats().num_dropped == 5)
    assert recorder.stats().last_error == "File exists"
    folder.unlink()
    recorder.record(trace([1], [5]))
    wait_for(lambda: recorder.stats().num_recorded == 1)
    recorder.close()
    assert [one.output_ids.tolist() for one in recorded(folder)] == [[5]]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "fails, serving goes on: File exists" in messages[0]
    assert "goes on" in messages[1]


def test_between_two_tries_records_are_dropped_unseen(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.write_text("no folder")
    recorder = Recorder(folder, retry_seconds=1000)
    recorder.record(trace([1], [1]))
    wait_for(lambda: recorder.stats().num_dropped == 1)
    folder.unlink()
    recorder.record(trace([1], [2]))
    recorder.close()
    assert recorder.stats() == RecorderStats(0, 2, "File exists")
    assert not folder.exists()


def test_a_recorder_that_is_closed_takes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.close()
    recorder.record(trace([1], [2]))
    recorder.close()
    assert recorder.stats() == RecorderStats(0, 1, "closed")
    assert list(tmp_path.iterdir()) == []


def test_many_threads_may_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, max_file_bytes=2000)

    def record(first: int) -> None:
        for number in range(first, first + 100):
            recorder.record(trace([number], [number], session=str(number)))

    threads = [threading.Thread(target=record, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert sorted(int(one.output_ids[0]) for one in recorded(tmp_path)) == list(range(400))


IN_A_PROCESS = """
import logging, os, resource, signal, sys, time
from pathlib import Path
from sglang_hvd.traces.recorder import Recorder
from tests.traces.made_up import trace
logging.basicConfig(stream=sys.stdout, format="%(message)s")
folder, what = Path(sys.argv[1]), sys.argv[2]
if what == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
recorder = Recorder(folder, retry_seconds=0 if what == "full" else 1000)
for number in range(100):
    tokens = [(number * 7919 + i * i * 104729) % 2**31 for i in range(50)]
    recorder.record(trace(tokens, [number], session=str(number)))
while recorder.stats().num_recorded + recorder.stats().num_dropped < 100:
    time.sleep(0.01)
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
recorder.close()
print(recorder.stats())
"""


def in_a_process(folder: Path, what: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS, str(folder), what],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        check=False,
    )


def test_a_file_system_that_takes_no_more_costs_single_records(tmp_path: Path) -> None:
    """The limit on the size of a file stands for a full disk: writing fails in the middle."""
    ended = in_a_process(tmp_path, "full")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    *messages, stats = ended.stdout.splitlines()
    assert "last_error='File too large'" in stats
    num_failed = sum("fails, serving goes on: File too large" in line for line in messages)
    assert 0 < num_failed < 20
    # Each failure is followed by a file that works, which is said too.
    assert len(messages) <= 2 * num_failed
    assert f"num_dropped={num_failed}" in stats
    recorder = Recorder(tmp_path)  # salvages what could not be completed
    recorder.close()
    assert len(recorded(tmp_path)) == 100 - num_failed


def test_the_next_recorder_salvages_what_a_killed_one_left(tmp_path: Path) -> None:
    ended = in_a_process(tmp_path, "killed")
    assert ended.returncode == -9
    assert recordings(tmp_path) == []
    Recorder(tmp_path).close()
    assert [int(one.output_ids[0]) for one in recorded(tmp_path)] == list(range(100))


def test_a_folder_removed_under_the_recorder_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    recorder = Recorder(folder, retry_seconds=0)
    recorder.record(trace([1], [1]))
    wait_for(lambda: recorder.stats().num_recorded == 1)
    shutil.rmtree(folder)
    recorder.close()
    assert recorder.stats().last_error == "moved or removed by others"
    recorder = Recorder(folder)
    recorder.record(trace([1], [2]))
    recorder.close()
    assert [one.output_ids.tolist() for one in recorded(folder)] == [[2]]


@pytest.mark.parametrize("takes_away", [shutil.rmtree, lambda path: path.rename(f"{path} 2")])
def test_a_part_that_others_take_away_is_missed_by_the_next_trace(
    tmp_path: Path, takes_away: Callable[[Path], object]
) -> None:
    folder = tmp_path / "folder"
    recorder = Recorder(folder, retry_seconds=0)
    recorder.record(trace([1], [1]))
    wait_for(lambda: recorder.stats().num_recorded == 1)
    takes_away(folder)
    for number in (2, 3):
        recorder.record(trace([1], [number]))
    recorder.close()
    stats = recorder.stats()
    assert (stats.num_recorded, stats.num_dropped) == (2, 1)
    assert stats.last_error == "moved or removed by others"
    assert [one.output_ids.tolist() for one in recorded(folder)] == [[3]]


def test_a_file_that_is_old_enough_is_completed_though_no_request_ends(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, max_file_seconds=0.2)
    recorder.record(trace([1], [1]))
    wait_for(lambda: recorder.stats().num_recorded == 1)
    wait_for(lambda: len(recordings(tmp_path)) == 1)
    recorder.close()
    assert [one.output_ids.tolist() for one in recorded(tmp_path)] == [[1]]


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.record(trace([1], [1]))
    recorder.close()
    [path] = recordings(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.name.split("-")[2] == str(os.getpid())


def test_a_recorder_logs_nothing_when_all_is_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="sglang_hvd"):
        recorder = Recorder(tmp_path)
        recorder.record(trace([1], [1]))
        recorder.close()
    assert caplog.records == []
