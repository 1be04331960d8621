"""The paper's harness with real servers: killed, resumed, slowed, and a server that dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper import run as paper_run
from benchmarks.paper.kept import Job
from benchmarks.serving.client import Answer, Played, play
from sglang_hvd.cli import main
from sglang_hvd.demo.server import Process
from sglang_hvd.paper.results import Measurement, Result, read_result
from sglang_hvd.paper.rounds import Measured, Rounds
from tests.e2e.conftest import HANGS_AFTER_S
from tests.e2e.forked_server import PROJECT_FIRST, Nursery

SETS = ("delegate-52", "mt-bench")
SMALL = (
    *("--model", "demo", "--data-sets", ",".join(SETS), "--prompts", "2"),
    *("--warm-up-prompts", "4", "--concurrency", "1,2", "--rounds", "2", "--max-tokens", "24"),
)
MODES = ("greedy", "eagle3", "hvd-paper", "hvd", "eagle3-adaptive", "ngram")


def run_small(folder: Path, modes: Sequence[str], launch: Any, *flags: str) -> Result:
    given = [*SMALL, "--modes", ",".join(modes), "--out", str(folder), *flags]
    assert paper.main(given, launch=launch) == 0
    return read_result(folder / "result.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paper")


@pytest.fixture(scope="module")
def before(folder: Path) -> tuple[Measurement, ...]:
    """What a run has measured when it is killed in the middle of its measurements."""
    command = [sys.executable, "-m", "benchmarks.paper", *SMALL, "--modes", ",".join(MODES)]
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [*command, "--out", str(folder)], env={**os.environ, **PROJECT_FIRST}, stderr=errors
        )
        deadline = time.monotonic() + HANGS_AFTER_S
        path = folder / "result.json"
        while not path.exists() or len(read_result(path).measurements) < 3:
            assert process.poll() is None, (folder / "stderr").read_text()
            assert time.monotonic() < deadline, (folder / "stderr").read_text()
            time.sleep(0.05)
        process.kill()
        process.wait()
    broken = read_result(path)
    assert not broken.is_complete
    return broken.measurements


@pytest.fixture(scope="module")
def whole(folder: Path, before: tuple[Measurement, ...], nursery: Nursery) -> Result:
    """The result after the same command was given again."""
    return run_small(folder, MODES, nursery.launch)


def jobs_of(modes: Sequence[str]) -> set[Job]:
    cells = [(name, "official", number) for name in SETS for number in (1, 2)]
    return {
        Job(mode, *cell, None, number)  # type: ignore[arg-type]
        for mode in modes
        for cell in (*cells, ("mt-bench", "none", 1))
        for number in range(2)
    }


def test_a_run_that_was_killed_goes_on_where_it_was(
    before: tuple[Measurement, ...], whole: Result
) -> None:
    assert len(before) >= 3
    assert whole.measurements[: len(before)] == before
    found = [Job.of(m) for m in whole.measurements]
    assert len(found) == len(set(found))
    assert set(found) == jobs_of([mode for mode in MODES if mode != "eagle3-adaptive"])
    assert whole.is_complete


def test_a_mode_that_cannot_be_served_is_a_row_with_its_reason(whole: Result) -> None:
    why_not = {mode.name: mode.why_not for mode in whole.modes}
    # SGLang's adaptive drafter needs what a CPU does not have.
    assert "NotImplementedError in " in str(why_not.pop("eagle3-adaptive"))
    assert set(why_not.values()) == {None}


def test_every_mode_replies_as_the_target_alone(whole: Result) -> None:
    assert all(m.is_identical for m in whole.measurements)
    assert all(m.error is None for m in whole.measurements)
    by_cell: dict[tuple[str, str, int], set[int]] = {}
    for m in whole.measurements:
        by_cell.setdefault((m.data_set, m.template, m.concurrency), set()).add(m.num_tokens)
    assert all(len(numbers) == 1 for numbers in by_cell.values())


def test_cycles_and_accepted_tokens_add_up(whole: Result) -> None:
    for m in whole.measurements:
        num_known = 0 if m.mode == "ngram" else m.num_cycles  # SGLang does not say
        assert sum(m.cycles.values()) == num_known, Job.of(m)
        assert sum(m.accepted.values()) == m.cycles.get("cache", 0) + m.cycles.get("both", 0)
        # A prefill generates each reply's first token, and a cycle a bonus token at most.
        assert m.num_requests + m.num_cycles + m.num_accepted >= m.num_tokens
        assert m.num_requests >= 4  # two prompts, and what their users say next
        assert m.ttft_ms is not None
        assert 0 < m.ttft_ms[0] <= m.ttft_ms[2] <= 1000 * m.seconds
    used = {mode: {s for m in of(whole, mode) for s in m.cycles} for mode in MODES}
    assert used["greedy"] == {"none"}
    assert used["eagle3"] == {"model"}
    assert used["hvd-paper"] <= {"cache", "model"}
    assert "cache" in used["hvd"]


def of(result: Result, mode: str, **wanted: Any) -> list[Measurement]:
    return [
        m
        for m in result.measurements
        if m.mode == mode and all(getattr(m, name) == value for name, value in wanted.items())
    ]


def test_each_round_begins_with_the_same_caches(whole: Result) -> None:
    """One request at a time and without measured costs, a mode's cycles are the same again."""
    for mode in ("greedy", "eagle3", "hvd-paper", "ngram"):
        for name in SETS:
            for template in ("official", "none"):
                rounds = of(whole, mode, data_set=name, template=template, concurrency=1)
                assert len({(m.num_cycles, m.num_accepted) for m in rounds}) <= 1, (mode, name)


def test_the_predictor_learns_from_the_targets_replies_to_warm_up_prompts(
    folder: Path, whole: Result
) -> None:
    assert whole.training is not None
    assert whole.training.num_requests == 2 * 2 * 4
    assert whole.training.settings["batch_size"] == 65536
    [warning] = whole.training.warnings
    assert "Adam needs" in warning
    assert (folder / "predictor.safetensors").exists()
    flags = next(mode.flags for mode in whole.modes if mode.name == "hvd-paper")
    assert flags[-2:] == ("--hvd-predictor", str(folder / "predictor.safetensors"))
    assert [found.data_set for found in whole.selections] == list(SETS)
    for found in whole.selections:
        assert found.num_proposed > 0
        assert found.num_both <= min(found.num_high, found.num_selected)


def test_a_run_that_is_complete_measures_nothing_again(
    folder: Path, whole: Result, nursery: Nursery
) -> None:
    again = run_small(folder, MODES, nursery.launch)
    assert again == whole


def test_the_result_becomes_a_page_with_its_speedups(
    folder: Path, whole: Result, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(folder / "result.json"), "-o", str(page)]) == 0
    for name in SETS:
        speedup = Rounds(whole).speedup("hvd", "greedy", name)
        assert isinstance(speedup, Measured)
        assert f"<td>{speedup.value:.2f}<" in page.read_text()


def test_other_settings_are_refused_in_one_line(
    folder: Path, whole: Result, nursery: Nursery
) -> None:
    for flags in (("--max-tokens", "25"), ("--prompts", "3"), ("--", "--random-seed", "7")):
        with pytest.raises(ValueError, match="other settings"):
            run_small(folder, MODES, nursery.launch, *flags)
    assert read_result(folder / "result.json") == whole


def test_a_slowed_mode_shows_as_slower_and_a_server_that_dies_as_a_marked_row(
    whole: Result, nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, tuple[str, Process]] = {}  # by port

    def launch(command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> Process:
        process = nursery.launch(command, environment, log)
        started[command[-1]] = Path(log.name).stem.rpartition("-")[0], process
        return process

    num_left = 1

    def disturbed(url: str, *given: Any, so_far: list[Answer] | None = None, **more: Any) -> Played:
        nonlocal num_left
        mode, process = started[url.rsplit(":", 1)[1]]
        if mode == "eagle3":
            with slowed(process.pid):
                return play(url, *given, so_far=so_far, **more)
        if mode == "suffix" and so_far is not None and num_left:
            num_left -= 1
            return play(url, *given, so_far=_Killing(so_far, process.pid), **more)
        return play(url, *given, so_far=so_far, **more)

    monkeypatch.setattr(paper_run, "play", disturbed)
    one_at_a_time = ("--servers", "1")  # as on a GPU
    result = run_small(tmp_path / "out", ["greedy", "eagle3", "suffix"], launch, *one_at_a_time)
    assert result.training is None  # no mode needs it
    [died] = [m for m in result.measurements if m.error is not None]
    assert (died.mode, died.num_requests) == ("suffix", 1)
    assert died.num_tokens > 0
    assert (tmp_path / "out" / "logs" / "suffix-1.log").exists()  # it started again
    assert any(m.cycles.get("cache") for m in of(result, "suffix"))
    assert not result.is_complete
    # The rest goes on.
    assert {Job.of(m) for m in result.measurements} == jobs_of(["greedy", "eagle3", "suffix"])

    def speedup(found: Result) -> float:
        seconds = [sum(m.seconds for m in of(found, mode)) for mode in ("greedy", "eagle3")]
        return seconds[0] / seconds[1]

    assert speedup(result) < 0.5 * speedup(whole)
    # The same command measures what is lacking.
    mended = run_small(tmp_path / "out", ["greedy", "eagle3", "suffix"], launch, *one_at_a_time)
    assert mended.is_complete
    assert {m.error for m in mended.measurements} == {None}


class _Killing(list[Answer]):
    """Hands on the first answer and kills the server that gave it."""

    def __init__(self, answers: list[Answer], pid: int) -> None:
        self._answers, self._pid = answers, pid

    def append(self, answer: Answer) -> None:
        self._answers.append(answer)
        os.killpg(self._pid, signal.SIGKILL)


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Lets a process group run for a sixth of the time only."""
    is_done = threading.Event()

    def alternate() -> None:
        while not is_done.is_set():
            os.killpg(pid, signal.SIGSTOP)
            is_done.wait(0.05)
            os.killpg(pid, signal.SIGCONT)
            is_done.wait(0.01)

    thread = threading.Thread(target=alternate)
    thread.start()
    yield
    is_done.set()
    thread.join()
