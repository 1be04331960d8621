"""What the demo shows: at its end, while it plays, and where there are no colours."""

import io
import os
from dataclasses import replace

import pytest
from rich.console import Console

from sglang_hvd.demo.printout import Printout, demo_console
from sglang_hvd.demo.screen import Screen
from sglang_hvd.demo.token_text import THEME, TokenText, legend
from tests.demo.made_up import CYCLES, TOKENS, VIEWED, reply
from tests.demo.test_report import ROWS

PRINTOUT = Printout(ROWS, "made up", "allocate", [VIEWED])


def console(*, width: int = 100, height: int = 24, is_terminal: bool = True) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=is_terminal,
        color_system="256" if is_terminal and "NO_COLOR" not in os.environ else None,
        width=width,
        height=height,
        theme=THEME,
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_file_has_a_letter_below_each_character() -> None:
    to = console(is_terminal=False)
    PRINTOUT.print_to(to)
    assert "\x1b" not in written(to)
    lines = [line.rstrip() for line in written(to).splitlines()]
    start = lines.index("a[b] cd")
    assert lines[start : start + 4] == ["a[b] cd", "TTTTPPT", "e fg h", "BTTMTT"]
    assert "P prompt copy" in written(to)
    assert lines[-1].endswith("990 with plain decoding.")


def test_a_terminal_shows_sources_by_colour_and_style() -> None:
    to = console()
    to.print(TokenText(TOKENS, VIEWED.sources))
    assert "\x1b[1;38;5;16;48;5;77m c\x1b[0m" in written(to)
    assert "TTTT" not in written(to)
    assert "\x1b[4;38;5;16;48;5;111mg\x1b[0m" in written(to)


def test_a_user_who_refuses_colours_gets_letters_and_styles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    to = Console(file=io.StringIO(), force_terminal=True, color_system="256", width=80, theme=THEME)
    to.print(legend(to), TokenText(TOKENS, VIEWED.sources))
    assert "\x1b[1m c\x1b[0m" in written(to)
    assert "48;5" not in written(to)
    assert "TTTTPPT" in written(to)
    assert "M model drafter" in written(to)


@pytest.mark.parametrize("width", [20, 40, 80])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    to = console(width=width, is_terminal=False)
    long = replace(VIEWED, tokens=("word " * 30, *VIEWED.tokens[1:]))
    Printout(ROWS, "made up", "allocate", [long]).print_to(to)
    lines = written(to).splitlines()
    assert max(map(len, lines)) <= max(width, 37)  # the narrowest table


def test_without_hvd_there_is_a_table_alone() -> None:
    to = console(is_terminal=False)
    Printout([row for row in ROWS if row.mode != "allocate"], "made up", None, []).print_to(to)
    assert "tokens/s" in written(to)
    assert "HVD" not in written(to)


def test_a_text_that_differs_is_told() -> None:
    to = console(is_terminal=False)
    wrong = [replace(row, outputs_identical=row.mode == "plain") for row in ROWS[:3]]
    Printout(wrong, "made up", None, []).print_to(to)
    assert "The text differs from plain decoding: eagle3 on editing, allocate on editing." in (
        written(to)
    )


def test_a_control_character_never_reaches_the_terminal() -> None:
    to = console()
    to.print(TokenText(["a\x1b[2Jb"], ["target"]))
    assert "\x1b[2J" not in written(to)


def test_the_picture_needs_no_network() -> None:
    svg = PRINTOUT.as_svg()
    assert "sglang-hvd" in svg
    assert "font-face" not in svg
    assert "url(http" not in svg


def test_the_screen_writes_a_reply_cycle_by_cycle_and_leaves_nothing() -> None:
    to = console(width=40)
    screen = Screen(to, ["plain", "allocate"], num_turns=3)
    slow = replace(VIEWED, cycles=tuple(replace(c, ms=60.0) for c in CYCLES))
    with screen.open():
        screen.count({"plain": reply(seconds=0.07), "allocate": reply(seconds=0.035)})
        screen.write(reply(), slow)
    text = written(to)
    assert "chat, turn 1 of 3" in text
    assert "100 tokens/s" in text
    assert "200 tokens/s" in text
    assert text.index(" c\x1b[0md") < text.index("g\x1b[0m"), "nothing is drawn before the end"
    assert text.endswith("\x1b[1A\x1b[2K\x1b[?25h") or "\x1b[2K" in text[-200:]


def test_the_screen_never_outgrows_a_terminal_of_few_lines() -> None:
    to = console(width=40, height=14)
    screen = Screen(to, ["plain", "allocate"], num_turns=1)
    tall = replace(VIEWED, tokens=tuple(f"line {i}\n" for i in range(50)), cycles=CYCLES[:1])
    with screen.open():
        screen.count({"plain": reply(), "allocate": reply()})
        screen.write(reply(), tall)
    text = written(to)
    assert "line 49" in text
    assert "line 2\n" not in text
    assert "tokens/s" in text


def test_the_screen_draws_nothing_into_a_file() -> None:
    to = console(is_terminal=False)
    screen = Screen(to, ["plain"], num_turns=1)
    with screen.open():
        screen.count({"plain": reply()})
        screen.write(reply(), VIEWED)
    assert written(to) == ""


def test_a_dumb_terminal_keeps_its_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    assert demo_console().width == 40
