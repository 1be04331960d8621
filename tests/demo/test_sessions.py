import re

import pytest

from sglang_hvd.demo.corpus.session import FAMILIES, Family
from sglang_hvd.demo.corpus.sessions import demo_sessions, train_sessions


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_seeds_draw_equal_sessions_and_other_seeds_others(family: Family) -> None:
    drawn = demo_sessions(family, count=5, seed=3)
    assert demo_sessions(family, count=5, seed=3) == drawn
    assert demo_sessions(family, count=5, seed=4) != drawn


@pytest.mark.parametrize("family", FAMILIES)
def test_measured_sessions_are_never_trained_on(family: Family) -> None:
    trained = {s for seed in range(3) for s in train_sessions(family, count=300, seed=seed)}
    assert not trained & set(demo_sessions(family, count=300, seed=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_session_has_several_turns_with_text(family: Family) -> None:
    for session in demo_sessions(family, count=50, seed=0):
        assert session.family == family
        assert len(session.turns) >= 2
        assert all(turn.user and turn.assistant for turn in session.turns)


def fenced_lines(text: str) -> list[str]:
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if line.startswith("```")]
    return lines[fences[0] + 1 : fences[1]]


def lines_by_number(text: str) -> dict[int, str]:
    """The lines `number|text` of a text. Three dots at a line's end are not part of it."""
    numbered = re.findall(r"^(\d+)\|(.*)$", text, re.MULTILINE)
    return {int(number): line.removesuffix("...").rstrip() for number, line in numbered}


def test_an_edit_puts_the_wanted_lines_into_the_file_and_leaves_the_others() -> None:
    for session in demo_sessions("editing", count=60, seed=1):
        file = lines_by_number("\n".join(fenced_lines(session.turns[0].user)))
        for turn in session.turns:
            asked, shown = re.split(r"\nChange (.* of .*):\n", f"\n{turn.user}")[1:]
            said = lines_by_number(shown)
            changed = {int(number) for number in re.findall(r"\d+", asked.split(" of ")[0])}
            near = {number + step for number in changed for step in (-1, 0, 1)}
            assert set(said) == near & set(file)
            assert {number for number in said if said[number] != file[number]} == changed
            file |= said
            assert lines_by_number("\n".join(fenced_lines(turn.assistant))) == file


def test_equal_words_in_a_file_are_followed_by_equal_words() -> None:
    """No copier that looks at a few words can take one line of a file for another."""
    for session in demo_sessions("editing", count=60, seed=2):
        after: dict[tuple[str, ...], str] = {}
        words = re.findall(r"\w+|\S", "\n".join(fenced_lines(session.turns[0].user)))
        for *before, word in zip(words, words[1:], words[2:], words[3:], words[4:], strict=False):
            assert after.setdefault(tuple(before), word) == word
