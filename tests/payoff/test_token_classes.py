"""Which text belongs to which class, and what a vocabulary's table says about a draft."""

import numpy as np
import pytest

from sglang_hvd.payoff.token_classes import TokenClass, TokenClasses

W, P, L, B, D, S, A, N = TokenClass


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("", 0),
        ("word", A),
        (" word", S),
        ("42", N),
        ("变量", A),
        ("é", A),
        (" ", W),
        ("\t\t", W),
        ("\n", W | L),
        ("\r\n  ", W | L),
        ("end\n", L | A),
        (".", P),
        ("...", P),
        (" +", P),
        ("。", P),
        ("$", P),
        (",", P | D),
        (";\n", P | L | D),
        ("(", P | B),
        (" []", P | B),
        ("foo(", B),
        ("</", P | B | D),
        ('":"', P | D),
        ("it's", D),
        ("a/b", D),
        ("\\n", D),
        ("<|im_end|>", B | D),
        ("\ufffd", P),
        (" x1", N),
        ("\tword", S),
        ("it is", 0),
    ],
)
def test_classes_of_a_token(text: str, classes: int) -> None:
    assert TokenClasses.from_strings([text]).flags[0] == int(classes)


def test_the_table_cannot_be_written_to_and_keeps_no_reference() -> None:
    mine = np.array([1], dtype=np.uint8)
    table = TokenClasses(mine)
    mine[0] = 2
    assert table.flags[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        table.flags[0] = 3


def test_a_vocabulary_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="got no token"):
        TokenClasses.from_strings([])


@pytest.mark.parametrize("flags", [np.zeros(3), np.zeros((1, 1), dtype=np.uint8)])
def test_a_table_of_another_shape_or_type_is_refused(flags: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"uint8\[vocab_size\]"):
        TokenClasses(flags)
