"""What the demo prints."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from sglang_hvd.demo.report import TABLE_WIDTH, Row, by_source, legend, table
from tests.view.made_up import cycle

ROW = Row("tool_calls", "plain", 83.21, 1000.0, 0.0, 12.02, 0.0, True)
ROWS = [ROW, replace(ROW, mode="eagle3", tokens_per_s=166.42), replace(ROW, workload="all")]

BY_SOURCE = by_source(["a[b]", " c", "d", "e"], [cycle(1, "cache", 2)])


def printed(*, is_terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=TABLE_WIDTH, soft_wrap=True)
    console.print(table(ROWS), legend(), BY_SOURCE)
    return file.getvalue()


def test_into_a_file_everything_is_plain_and_whole() -> None:
    text = printed(is_terminal=False)
    assert "\x1b" not in text
    assert "\u2026" not in text  # no cell is cut
    lines = [line.split() for line in text.splitlines()]
    assert ["tool_calls", "eagle3", "166.4", "1.00", "2.00", "1000", "0.00", "12.0", "0%"] in [
        line[:9] for line in lines
    ]
    assert "a[b] cde" in text


def test_a_terminal_shows_sources_by_colour_and_by_style() -> None:
    text = printed(is_terminal=True)
    assert "a[b]\x1b[1;32m c\x1b[0m\x1b[1;32md\x1b[0me" in text
    assert "\x1b[4;36mmodel (underline cyan)\x1b[0m" in text


def test_a_user_who_refuses_colours_still_sees_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(is_terminal=True)
    assert "a[b]\x1b[1m c\x1b[0m\x1b[1md\x1b[0me" in text
    assert "32m" not in text
