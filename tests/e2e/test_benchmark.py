"""SGLang's own benchmark of serving runs against an HVD server as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_hvd.demo.models import DemoModels
from sglang_hvd.demo.server import CPU_ENVIRONMENT
from tests.e2e.conftest import Server


def test_sglangs_benchmark_of_serving(
    start_hvd: Callable[..., Server], models: DemoModels, tmp_path: Path
) -> None:
    server, rows = start_hvd("allocate"), tmp_path / "rows.jsonl"
    before = sum(server.hvd_state()["num_cycles"].values())
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"]
    command += ["--base-url", server.process.url, "--tokenizer", str(models.target)]
    command += ["--dataset-name", "random-ids", "--num-prompts", "12", "--max-concurrency", "4"]
    command += ["--random-input-len", "32", "--random-output-len", "16"]
    command += ["--output-file", str(rows)]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **CPU_ENVIRONMENT, "HF_HUB_OFFLINE": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    [row] = map(json.loads, rows.read_text().splitlines())
    assert row["completed"] == 12
    assert row["total_output_tokens"] >= 12
    assert sum(server.hvd_state()["num_cycles"].values()) > before
