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
        assert len(session.turns) >= (3 if family == "editing" else 2)
        assert all(turn.user and turn.assistant for turn in session.turns)


def fenced_lines(text: str) -> list[str]:
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if line.startswith("```")]
    return lines[fences[0] + 1 : fences[1]]


def test_a_whole_file_reply_changes_the_file_and_leaves_most_of_it() -> None:
    for session in demo_sessions("editing", count=60, seed=1):
        if "Return the whole file." not in session.turns[0].user:
            continue
        file = fenced_lines(session.turns[0].user)
        for turn in session.turns:
            edited = fenced_lines(turn.assistant)
            assert edited != file
            assert len(set(edited) & set(file)) > 0.6 * len(set(file))
            file = edited


def test_a_search_replace_block_applies_to_the_file() -> None:
    sessions = demo_sessions("editing", count=60, seed=1)
    with_blocks = [s for s in sessions if "Use SEARCH/REPLACE blocks." in s.turns[0].user]
    assert with_blocks
    for session in with_blocks:
        file = "\n".join(fenced_lines(session.turns[0].user))
        for turn in session.turns:
            _, block = turn.assistant.split("<<<<<<< SEARCH\n")
            search, rest = block.split("\n=======\n")
            assert search in file
            file = file.replace(search, rest.removesuffix("\n>>>>>>> REPLACE"), 1)
