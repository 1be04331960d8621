"""The benchmark of what a batch pays for one request's parameters."""

import json
from pathlib import Path

import pytest

from benchmarks.sampling_cost import Measured, _row, main


def test_ratios_are_those_of_the_same_round() -> None:
    bases = [Measured(10, wall=4, process=2, host=1), Measured(10, wall=40, process=20, host=10)]
    rounds = [Measured(10, wall=8, process=3, host=1), Measured(10, wall=80, process=30, host=10)]
    row = _row("min_p", "temperature", rounds, bases)
    assert (row.wall_ratio, row.process_ratio, row.host_ratio) == (2, 1.5, 1)
    assert row.process_ratio_spread == 0
    assert (row.steps, row.host_us) == (10, 5500)


def test_a_checkout_that_cannot_serve_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--against", str(tmp_path)])
    assert "has no .venv" in capsys.readouterr().err


@pytest.mark.slow  # it starts a server as a user does
def test_every_cell_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.json"
    small = ["--requests", "2", "--steps", "6", "--rounds", "1"]
    assert main([*small, "--json", str(rows)]) == 0
    found = {row["cell"]: row for row in json.loads(rows.read_text())}
    assert {"frequency_penalty", "min_p", "processor"} <= found.keys()
    assert all(row["steps"] > 0 and row["process_ratio"] > 0 for row in found.values())
    assert "one request asks for" in capsys.readouterr().out
