"""The benchmark of snapshots and warm-ups runs, at a small size."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.warm_start import main


def test_snapshots_and_steps_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    arguments = ["warm_start", "--tokens", "20000", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    rows = json.loads(path.read_text())
    assert [row["phase"] for row in rows] == ["snapshot", "snapshot", "quiet", "warm-up"]
    assert all(0 < row["median ms"] <= row["p99 ms"] <= row["max ms"] for row in rows)
