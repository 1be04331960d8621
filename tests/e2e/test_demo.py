"""`sglang-hvd demo` as a user runs it: the rows of --json, a terminal, and the page of --html."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.cli import main
from sglang_hvd.demo.corpus.session import FAMILIES

# Servers for the other modes would take minutes. `model`, `frequency` and `both` differ from these
# by a flag, and tests/benchmarks/test_trace_serving.py serves NGRAM.
MODES = ("plain", "eagle3", "cache", "payoff", "allocate")
KEYS = [
    *("workload", "mode", "tokens_per_s", "cycles_per_1k", "mean_accepted", "ms_per_cycle"),
    *("cache_share", "outputs_identical"),
]


def run_on_a_terminal(columns: int, *flags: str) -> tuple[int, str]:
    """Run the demo on a terminal of 24 lines. Return its exit code and what it wrote."""
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        environment.pop(name, None)
    command = [str(Path(sys.executable).with_name("sglang-hvd")), "demo", *flags]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment) as demo:
        os.close(terminal)
        written = b""
        while part := _read(ours):
            written += part
        os.close(ours)
    return demo.returncode, written.decode()


def _read(ours: int) -> bytes:
    try:
        return os.read(ours, 65536)
    except OSError:  # Linux says so when the last writer has closed the terminal
        return b""


def test_a_narrow_terminal_shows_replies_being_written(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "demo.svg"
    code, written = run_on_a_terminal(
        *(40, "--sessions", "1", "--workloads", "editing"),
        *("--html", str(page), "--svg", str(picture)),
    )
    assert code == 0, written
    assert "Starting servers" in written
    assert "turn 1 of" in written
    assert "\x1b[1;38;5;16;48;5" in written, "no token is shown as a prompt copy"
    *_, last = written.split("by the source of each")
    assert "allocate" in last
    assert "tokens/s" in last
    assert "On this machine HVD is" in last
    assert "policy allocate" in page.read_text()
    assert picture.read_text().startswith("<svg")
    assert "http" not in picture.read_text().replace("http://www.w3.org", "").replace(
        "https://www.textualize.io", ""
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of one session per workload in every mode."""
    file = tmp_path_factory.mktemp("demo") / "rows.json"
    flags = ["--workloads", "all", "--sessions", "1", "--json", str(file)]
    assert main(["demo", *flags, "--modes", ",".join(MODES)]) == 0
    return json.loads(file.read_text())


@pytest.fixture
def editing(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of the editing sessions by mode."""
    return {row["mode"]: row for row in rows if row["workload"] == "editing"}


@pytest.mark.slow
def test_a_row_for_every_workload_and_mode(rows: list[dict[str, Any]]) -> None:
    assert [list(row) for row in rows] == [KEYS] * len(rows)
    assert [(row["workload"], row["mode"]) for row in rows] == [
        (workload, mode) for workload in [*FAMILIES, "all"] for mode in MODES
    ]


@pytest.mark.slow
def test_every_mode_gives_the_text_of_plain_decoding(rows: list[dict[str, Any]]) -> None:
    assert all(row["outputs_identical"] for row in rows)


@pytest.mark.slow
def test_payoff_needs_fewer_cycles_than_eagle3_on_edits(editing: dict[str, Any]) -> None:
    assert editing["payoff"]["cycles_per_1k"] < editing["eagle3"]["cycles_per_1k"]
    assert 0 < editing["payoff"]["cache_share"] < 1
    assert editing["eagle3"]["cache_share"] == editing["plain"]["mean_accepted"] == 0


@pytest.mark.slow
def test_payoff_needs_fewer_cycles_than_the_cache_alone_on_edits(editing: dict[str, Any]) -> None:
    assert editing["payoff"]["cycles_per_1k"] < editing["cache"]["cycles_per_1k"]
