"""SGLang's own benchmark of serving runs against an HVD server unchanged."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_hvd.demo.models import DemoModels
from sglang_hvd.demo.server import demo_environment
from tests.e2e.conftest import HANGS_AFTER_S, Server
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
