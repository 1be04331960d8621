"""A small tokenizer."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture
def words() -> list[str]:
    """The tokenizer's words, in the order of their ids."""
    return ["<eos>", "a", "b", "c", "d", ",", "\n"]


@pytest.fixture
def tokenizer(words: list[str]) -> Tokenizer:
    """Takes words apart at white space."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="d"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made
