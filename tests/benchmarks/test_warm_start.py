"""The benchmark of snapshots and warm-ups runs, at a small size."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import warm_start
from benchmarks.warm_start import main


def test_snapshots_and_steps_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    arguments = ["warm_start", "--tokens", "20000", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    rows = json.loads(path.read_text())
    assert [row["phase"] for row in rows] == ["snapshot", "snapshot", "quiet", "warm-up"]
    assert all(0 < row["median ms"] <= row["p99 ms"] <= row["max ms"] for row in rows)


@pytest.mark.e2e
def test_streams_of_a_server_are_timed_with_and_without_its_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--serve", "--rounds", "1", "--plays", "1", "--json", str(path)]
    arguments += ["--tokens", "6000000"]  # it must not end before the streams do
    monkeypatch.setattr(sys, "argv", ["warm_start", *arguments])
    monkeypatch.setattr(warm_start, "_STREAMS", 2)
    monkeypatch.setattr(warm_start, "_STREAM_TOKENS", 16)
    main()
    quiet, during = json.loads(path.read_text())
    assert (quiet["phase"], during["phase"]) == ("quiet", "warm-up")
    assert quiet["plays"] == during["plays"] == 1
    assert 0 < during["median ms"] <= during["p99 ms"]
    assert 0 < during["warm tokens"] < 6_000_000
