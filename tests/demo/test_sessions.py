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


def test_an_edit_puts_the_wanted_lines_into_the_file_and_leaves_the_others() -> None:
    for session in demo_sessions("editing", count=60, seed=1):
        file = fenced_lines(session.turns[0].user)
        for turn in session.turns:
            wanted = re.split(r"\nChange lines? .* of .*:\n", f"\n{turn.user}")[1]
            for line in wanted.split("\n"):
                number = line.split("|")[0]
                file = [line if old.split("|")[0] == number else old for old in file]
            assert fenced_lines(turn.assistant) == file
