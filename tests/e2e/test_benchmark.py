"""SGLang's own benchmark of serving runs against an HVD server unchanged. Ours keeps what it has
measured when a server does not start or is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.__main__ import main
from benchmarks.serving.client import Answer
from benchmarks.serving.measure import Cell, measure
from sglang_hvd.demo.models import DemoModels
from sglang_hvd.demo.server import demo_environment
from tests.e2e.conftest import HANGS_AFTER_S, Server, request_body
from tests.e2e.forked_server import Nursery


def test_sglangs_benchmark_of_serving(
    start_hvd: Callable[..., Server], models: DemoModels, nursery: Nursery, tmp_path: Path
) -> None:
    server, rows, log = start_hvd("allocate"), tmp_path / "rows.jsonl", tmp_path / "log"
    before = sum(server.hvd_state()["num_cycles"].values())
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"]
    command += ["--base-url", server.process.url, "--tokenizer", str(models.target)]
    command += ["--dataset-name", "random-ids", "--num-prompts", "12", "--max-concurrency", "4"]
    command += ["--random-input-len", "32", "--random-output-len", "16"]
    command += ["--output-file", str(rows)]
    environment = {**os.environ, **demo_environment(), "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        ran = nursery.launch(command, environment, output)
    assert ran.wait(timeout=HANGS_AFTER_S) == 0, log.read_text()[-3000:]
    [row] = map(json.loads, rows.read_text().splitlines())
    assert row["completed"] == 12
    assert row["total_output_tokens"] >= 12
    assert sum(server.hvd_state()["num_cycles"].values()) > before


def test_a_server_that_is_killed_keeps_its_rows_and_is_marked(
    start_server: Callable[..., Server], start_hvd: Callable[..., Server], prompts: list[str]
) -> None:
    # Servers of this test alone, because one of them is killed.
    plain = start_server("--served-model-name", "stays")
    killed = start_hvd("cache", "--served-model-name", "killed")
    bodies: list[dict[str, Any]] = []

    def talk(answers: Sequence[Answer]) -> dict[str, Any] | None:
        if answers:
            return None
        bodies.append(request_body(prompts[0], max_new_tokens=16))
        # Rounds begin with another server each: plain, cache, cache.
        if len(bodies) == 3:
            process = killed.process._process
            assert process is not None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return bodies[-1]

    urls = {"plain": plain.process.url, "cache": killed.process.url}
    cell = Cell("made", "chat", 1, [talk], lambda answer: True)
    rows = measure(urls, [cell], rounds=2, warm_up=False)
    assert [(row.mode, row.num_rounds, row.is_complete) for row in rows] == [
        ("plain", 2, True),
        ("cache", 1, False),
    ]
    assert rows[0].fault is None
    assert rows[1].fault is not None
    assert killed.process.url in rows[1].fault
    assert all(row.tokens_per_s and row.speedup_vs_plain for row in rows)


def test_a_mode_that_cannot_be_served_here_is_marked_in_one_line(
    nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "rows.json"
    flags = ["--modes", "eagle3-adaptive,plain", "--phases", "chat,editing,chat"]
    flags += ["--sessions", "2", "--concurrency", "1", "--rounds", "1", "--max-tokens", "16"]
    assert main([*flags, "--json", str(found)], launch=nursery.launch) == 1
    rows = json.loads(found.read_text())
    assert [(row["phase"], row["mode"], row["is_complete"]) for row in rows] == [
        (phase, mode, mode == "plain")
        for phase in (1, 2, 3)
        for mode in ("plain", "eagle3-adaptive")
    ]
    # SGLang's CPU backends have no graphs, of which it captures one for each number of steps.
    why = "NotImplementedError in init_cuda_graph_state"
    assert {row["fault"] for row in rows} == {None, why}
    printed = capsys.readouterr()
    said = [line for line in printed.err.splitlines() if "adaptive" in line]
    assert said == [f"eagle3-adaptive cannot be served here: {why}"]
    assert "Traceback" not in printed.out + printed.err
