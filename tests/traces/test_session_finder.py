"""Which requests are turns of one session."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_hvd.traces.session_finder import SessionFinder


def place(
    finder: SessionFinder, prompt: list[int], output: list[int], namespace: str = ""
) -> tuple[str, int]:
    return finder.place(np.array(prompt, np.int32), np.array(output, np.int32), namespace=namespace)


@pytest.fixture
def finder() -> SessionFinder:
    return SessionFinder("s-")


@pytest.mark.parametrize(
    "second",
    [
        [1, 2, 3, 4, 9],  # begins with all of it
        [1, 2, 3, 8, 9],  # the template wrote another end of the turn
        [1, 2, 7, 7, 9],  # the output came back changed
    ],
)
def test_a_prompt_that_begins_with_an_earlier_turn_goes_on_with_it(
    finder: SessionFinder, second: list[int]
) -> None:
    assert place(finder, [1, 2], [3, 4]) == ("s-0", 0)
    assert place(finder, [5], [6]) == ("s-1", 0)
    assert place(finder, second, [1]) == ("s-0", 1)
    assert place(finder, [*second, 1, 1], [2]) == ("s-0", 2)


@pytest.mark.parametrize("other", [[1], [1, 2], [2, 2, 3], [1, 3, 3, 4, 5]])
def test_a_prompt_that_does_not_go_on_begins_a_session(
    finder: SessionFinder, other: list[int]
) -> None:
    place(finder, [1, 2], [3, 4])
    assert place(finder, other, [1]) == ("s-1", 0)


def test_the_longest_beginning_decides(finder: SessionFinder) -> None:
    place(finder, [1], [2])
    assert place(finder, [7, 1], [2]) == ("s-1", 0)
    assert place(finder, [7, 1, 2, 3], [4]) == ("s-1", 1)
    place(finder, [1, 2], [])  # a session of its own: [1] was another prompt
    assert place(finder, [1, 2, 5], [6])[1] > 0


def test_namespaces_are_kept_apart(finder: SessionFinder) -> None:
    place(finder, [1, 2], [3], "a")
    assert place(finder, [1, 2, 3, 4], [5], "b") == ("s-1", 0)
    assert place(finder, [1, 2, 3, 4], [5], "a") == ("s-0", 1)


def test_a_prompt_of_nothing_begins_no_session_of_others(finder: SessionFinder) -> None:
    place(finder, [], [])
    assert place(finder, [1], [2]) == ("s-1", 0)


def test_old_requests_are_forgotten_and_memory_is_bounded() -> None:
    finder = SessionFinder("s-", max_marks=6)
    for token in range(10):
        place(finder, [token, 0], [1, 2], f"n{token}")
    assert place(finder, [0, 0, 1, 2, 3], [4], "n0") == ("s-10", 0)
    assert place(finder, [9, 0, 1, 2, 3], [4], "n9") == ("s-9", 1)
    for token in range(100):
        place(finder, [token] * (token + 1), [token], f"n{token}")
    assert len(finder._sessions) == len(finder._places) == np.count_nonzero(finder._lengths) == 6
    assert {mark.namespace for mark in finder._sessions} == {"n97", "n98", "n99"}


def test_beginnings_whose_sums_agree_by_chance_are_compared() -> None:
    finder = SessionFinder("s-")
    place(finder, [1, 2], [3])
    finder._sums[:] = finder._sums_of(np.array([5, 6, 7, 8], np.int32))[2]
    assert place(finder, [5, 6, 7, 8], [1]) == ("s-1", 0)


def test_a_text_that_is_known_again_is_the_latest_and_takes_no_more_room() -> None:
    finder = SessionFinder("s-", max_marks=4)
    for token in (1, 2, 3, 4):
        place(finder, [token], [])
    for _ in range(5):
        place(finder, [1], [])  # the oldest, which would be the next to go
    assert place(finder, [3, 9], [])[0] == "s-2"  # instead of [2]
    assert place(finder, [1, 9], [])[0] == "s-8"  # the session that it was last part of
    assert place(finder, [2, 9], [])[0] == "s-9"


_ids = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(st.lists(st.tuples(_ids, _ids), max_size=12))
@example([([1], [2]), ([2], [1, 1]), ([1, 2, 1], [2]), ([1], [2])])
def test_sessions_are_those_of_a_comparison_of_all_texts(
    requests: list[tuple[list[int], list[int]]],
) -> None:
    finder = SessionFinder("")
    texts: dict[tuple[int, ...], str] = {}
    num_turns: dict[str, int] = {}
    for prompt, output in requests:
        beginnings = [text for text in texts if tuple(prompt[: len(text)]) == text]
        shorter = [text for text in beginnings if len(text) < len(prompt)]
        expected = texts[max(shorter, key=len)] if shorter else str(len(num_turns))
        turn = num_turns.get(expected, 0)
        assert place(finder, prompt, output) == (expected, turn)
        num_turns[expected] = turn + 1
        whole = (*prompt, *output)
        for text in (tuple(prompt), whole[:-1], whole):
            texts[text] = expected
