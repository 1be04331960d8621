"""The benchmark of the gap between two steps."""

import json
from pathlib import Path

import pytest

from benchmarks.gap import Measured, clock_seconds, main, row_of, step_us
from sglang_hvd.step_clock import Stage


def test_the_gap_is_the_sum_of_its_stages_without_the_draft() -> None:
    stages = {stage.value: 10.0 for stage in Stage}
    row = row_of(
        "text", 8, "allocate", "here", [Measured(900, 70, stages), Measured(700, 50, stages)]
    )
    assert (row.step_us, row.host_us, row.gap_us) == (800, 60, 40)


def test_a_mode_without_figures_has_a_time_of_its_steps_only() -> None:
    row = row_of("text", 8, "eagle3", "here", [Measured(900, None)])
    assert (row.step_us, row.host_us, row.gap_us, row.stages_us) == (900, None, None, {})


def test_steps_are_compared_where_all_requests_take_as_many() -> None:
    assert step_us(0.3, [149, 150]) == pytest.approx(2000)
    assert step_us(0.3, [20, 150]) is None


def test_the_clock_is_measured_by_itself() -> None:
    assert clock_seconds(200) > 0


def test_an_unknown_mode_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--modes", "quick"])
    assert "quick: choose from plain, eagle3" in capsys.readouterr().err


@pytest.mark.slow  # it starts servers as a user does
def test_every_mode_is_measured(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    small = ["--requests", "2", "--max-tokens", "64", "--rounds", "1"]
    assert main([*small, "--modes", "plain,ngram,allocate", "--json", str(rows)]) == 0
    found = {(row["text"], row["mode"]): row for row in json.loads(rows.read_text())}
    modes = "plain", "ngram", "allocate"
    assert found.keys() == {(text, mode) for text in ("text", "same", "noise") for mode in modes}
    assert all(found[text, "plain"]["step_us"] > 0 for text in ("text", "same", "noise"))
    assert found["same", "ngram"]["step_us"] > 0
    assert found["noise", "allocate"]["step_us"] > 0
    assert found["text", "allocate"]["gap_us"] > 0
