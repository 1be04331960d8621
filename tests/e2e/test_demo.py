"""The rows of `sglang-hvd demo --json`, and what they must show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, BinaryIO

import pytest

from sglang_hvd.cli import main
from sglang_hvd.config import HvdConfig
from sglang_hvd.demo import run
from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.server import Process, SglangServer, spawn
from tests.e2e.forked_server import Nursery

pytestmark = pytest.mark.slow  # five servers play sessions of every workload

# Servers for the other modes would take minutes. `model`, `frequency` and `both` differ from these
# by a flag, and tests/benchmarks/test_trace_serving.py serves NGRAM.
MODES = ("plain", "eagle3", "cache", "payoff", "allocate")
KEYS = [
    *("workload", "mode", "tokens_per_s", "cycles_per_1k", "mean_accepted", "ms_per_cycle"),
    *("cache_share", "outputs_identical"),
]


@pytest.fixture(scope="module")
def rows(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of one session per workload in every mode.

    Each mode has its own server. That of the default policy starts as a user's does, and the others
    are forked (tests/e2e/forked_server.py).
    """
    spawned = []

    def launch(command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> Process:
        if HvdConfig().policy not in command:
            return nursery.launch(command, environment, log)
        spawned.append(command)
        return spawn(command, environment, log)

    file = tmp_path_factory.mktemp("demo") / "rows.json"
    flags = ["--sessions", "1", "--json", str(file)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "SglangServer", partial(SglangServer, launch=launch))
        assert main(["demo", *flags, "--modes", ",".join(MODES)]) == 0
    assert len(spawned) == 1
    return json.loads(file.read_text())


@pytest.fixture
def editing(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of the editing sessions by mode."""
    return {row["mode"]: row for row in rows if row["workload"] == "editing"}


def test_a_row_for_every_workload_and_mode(rows: list[dict[str, Any]]) -> None:
    assert [list(row) for row in rows] == [KEYS] * len(rows)
    assert [(row["workload"], row["mode"]) for row in rows] == [
        (workload, mode) for workload in [*FAMILIES, "all"] for mode in MODES
    ]


def test_every_mode_gives_the_text_of_plain_decoding(rows: list[dict[str, Any]]) -> None:
    assert all(row["outputs_identical"] for row in rows)


def test_payoff_needs_fewer_cycles_than_eagle3_on_edits(editing: dict[str, Any]) -> None:
    assert editing["payoff"]["cycles_per_1k"] < editing["eagle3"]["cycles_per_1k"]
    assert 0 < editing["payoff"]["cache_share"] < 1
    assert editing["eagle3"]["cache_share"] == editing["plain"]["mean_accepted"] == 0


def test_payoff_needs_fewer_cycles_than_the_cache_alone_on_edits(editing: dict[str, Any]) -> None:
    assert editing["payoff"]["cycles_per_1k"] < editing["cache"]["cycles_per_1k"]
