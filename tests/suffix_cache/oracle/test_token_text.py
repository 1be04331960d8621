"""Sequences in one growing array."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_hvd.types import TokenIds
from tests.suffix_cache.oracle.token_text import END, TokenText

LARGEST = 2**31 - 1


def ids(*token_ids: int) -> TokenIds:
    return np.array(token_ids, dtype=np.int32)


def test_a_growing_sequence_ends_with_one_mark() -> None:
    text = TokenText(guard=3)
    text.extend(ids(7, 8))
    text.extend(ids(9))
    assert text.tokens.tolist() == [7, 8, 9]
    assert text.with_guard.tolist() == [END, END, END, 7, 8, 9, END]


def test_a_closed_sequence_is_followed_by_a_new_one() -> None:
    text = TokenText(guard=1)
    text.extend(ids(7, 8))
    text.close()
    text.extend(ids(9))
    assert text.with_guard.tolist() == [END, 7, 8, END, 9, END]


def test_the_text_keeps_no_reference_to_the_callers_array() -> None:
    mine = ids(1, 2)
    text = TokenText(guard=1)
    text.extend(mine)
    mine[0] = 5
    assert text.tokens.tolist() == [1, 2]


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=90), max_size=12),
    st.integers(1, 4),
    st.integers(1, 70),
)
def test_dropping_the_first_sequences_leaves_the_others(
    sequences: list[list[int]], num_kept: int, guard: int
) -> None:
    text = TokenText(guard)
    kept: list[list[int]] = []
    for sequence in sequences:
        text.extend(ids(*sequence))
        text.close()
        kept.append(sequence)
        if len(kept) > num_kept:
            text.drop_front(len(kept.pop(0)) + 1)
        assert text.tokens.tolist() == [t for s in kept for t in [*s, END]]
        assert len(text.with_guard) == guard + len(text) + 1
        assert text.with_guard[guard - 1] == END


def test_memory_does_not_grow_with_the_number_of_dropped_sequences() -> None:
    text = TokenText(guard=4)
    for _ in range(1000):
        text.extend(np.zeros(50, dtype=np.int32))
        text.close()
        text.drop_front(51)
    assert text.with_guard.base is not None
    assert text.with_guard.base.size < 1000
