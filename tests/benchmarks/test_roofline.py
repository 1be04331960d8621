"""The derived table of costs."""

from pathlib import Path

import pytest

from benchmarks.roofline import main

SHIPPED = Path(__file__).parents[2] / "configs/costs/llama-3.1-8b-h100.yaml"


def test_the_table_that_ships_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == SHIPPED.read_text()


def test_help_prints_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "usage: " in capsys.readouterr().out
