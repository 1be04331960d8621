"""The benchmark of the gap between two steps."""

import json
from pathlib import Path

import pytest

from benchmarks.gap import Measured, _row, clock_seconds, main
from sglang_hvd.step_clock import Stage


def test_the_gap_is_the_sum_of_its_stages_without_the_draft() -> None:
    stages = {stage.value: 10.0 for stage in Stage}
    row = _row(
        "text", 8, "allocate", "here", [Measured(900, 70, stages), Measured(700, 50, stages)]
    )
    assert (row.step_us, row.host_us, row.gap_us) == (800, 60, 40)


def test_a_mode_without_figures_has_a_time_of_its_steps_only() -> None:
    row = _row("text", 8, "eagle3", "here", [Measured(900, None)])
    assert (row.step_us, row.host_us, row.gap_us, row.stages_us) == (900, None, None, {})


def test_the_clock_is_cheap() -> None:
    assert 0 < clock_seconds(200) < 1e-3


def test_an_unknown_mode_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--modes", "quick"])
    assert "quick: choose from plain, eagle3" in capsys.readouterr().err


@pytest.mark.slow  # it starts servers as a user does
def test_every_mode_is_measured(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    small = ["--requests", "2", "--max-tokens", "16", "--rounds", "1", "--texts", "text"]
    assert main([*small, "--modes", "plain,ngram,allocate", "--json", str(rows)]) == 0
    found = {row["mode"]: row for row in json.loads(rows.read_text())}
    assert found.keys() == {"plain", "ngram", "allocate"}
    assert all(row["step_us"] > 0 for row in found.values())
    assert found["allocate"]["gap_us"] > 0
