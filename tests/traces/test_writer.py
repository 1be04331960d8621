"""A trace file has its name only when it is whole."""

import multiprocessing
import resource
from pathlib import Path

import pytest

from sglang_hvd.traces.reader import read_traces
from sglang_hvd.traces.writer import PartFile, TraceWriter
from tests.traces.made_up import trace, values_of


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_name_comes_with_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.hvdt"
    path.write_text("what was there before")
    with TraceWriter(path, model="a model", tokenizer_fingerprint="0123456789abcdef") as writer:
        writer.write(trace([1], [2]))
        assert path.read_text() == "what was there before"
        assert writer.num_bytes == (tmp_path / "x.hvdt.part").stat().st_size
    assert listing(tmp_path) == [path.name]
    assert values_of(list(read_traces(path))) == values_of([trace([1], [2])])


def test_an_exception_leaves_what_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "x.hvdt"
    path.write_text("what was there before")
    with pytest.raises(OverflowError), TraceWriter(path) as writer:
        writer.write(trace([1], [2**31]))
    assert listing(tmp_path) == [path.name]
    assert path.read_text() == "what was there before"


def test_a_file_has_traces_of_one_model(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"x.hvdt: a file has traces of one model and tokenizer"),
        TraceWriter(tmp_path / "x.hvdt", model="another") as writer,
    ):
        writer.write(trace([1], [2]))


def test_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x.jsonl: traces are written as .hvdt"):
        TraceWriter(tmp_path / "x.jsonl")


def test_a_file_is_written_by_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "x.hvdt"
    with TraceWriter(path) as writer:
        with pytest.raises(BlockingIOError):
            TraceWriter(path)
        writer.write(trace([1], [2], model="", tokenizer_fingerprint=""))
    assert len(list(read_traces(path))) == 1


def test_what_a_killed_process_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "x.hvdt.part").write_bytes(b"left behind" * 1000)
    with TraceWriter(tmp_path / "x.hvdt"):
        pass
    assert list(read_traces(tmp_path / "x.hvdt")) == []


def test_a_part_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PartFile(tmp_path / "x", is_left_behind=True)
    assert listing(tmp_path) == []


def _write_too_much(path: Path, is_met: bool, written: "multiprocessing.Queue[int]") -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3200, 3200))
    with TraceWriter(path, model="a model", tokenizer_fingerprint="0123456789abcdef") as writer:
        num_written = 0
        try:
            for number in range(1000):
                tokens = [(number * 7919 + i * i * 104729) % 2**31 for i in range(50)]
                writer.write(trace(tokens, [1], session=str(number)))
                num_written += 1
        except OSError:
            written.put(num_written)
            if not is_met:
                raise


def test_a_disk_that_is_full_costs_the_record_and_not_the_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    for is_met in (True, False):
        path = tmp_path / f"{is_met}.hvdt"
        written = context.Queue()
        process = context.Process(target=_write_too_much, args=(path, is_met, written))
        process.start()
        num_written = written.get(timeout=60)
        process.join()
        assert 0 < num_written < 20
        if is_met:
            assert process.exitcode == 0
            assert len(list(read_traces(path))) == num_written
        else:
            assert process.exitcode == 1
    assert listing(tmp_path) == ["True.hvdt"]
