from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.corpus.sessions import demo_sessions, train_sessions
from sglang_hvd.demo.training.dataset import encode
from sglang_hvd.demo.training.demo_tokenizer import (
    END,
    END_ID,
    PAD,
    PAD_ID,
    START,
    START_ID,
    save_tokenizer,
    spellings,
    train_tokenizer,
)

SESSIONS = [s for family in FAMILIES for s in train_sessions(family, count=20, seed=0)]
TOKENIZER = train_tokenizer(SESSIONS, vocab_size=1024)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(TOKENIZER, directory, max_length=4096)
    return AutoTokenizer.from_pretrained(directory)


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_training_is_deterministic() -> None:
    assert train_tokenizer(SESSIONS, vocab_size=1024).to_str() == TOKENIZER.to_str()


def test_special_tokens_have_their_fixed_ids() -> None:
    assert [TOKENIZER.token_to_id(t) for t in (PAD, START, END)] == [PAD_ID, START_ID, END_ID]


def test_transformers_loads_it_with_the_end_of_a_message_as_eos(
    loaded: PreTrainedTokenizerBase,
) -> None:
    assert loaded.eos_token_id == END_ID
    assert loaded.pad_token_id == PAD_ID


def test_a_line_begins_with_the_same_word_at_every_indentation() -> None:
    assert TOKENIZER.encode("\nreturn").tokens[1:] == TOKENIZER.encode("\n    return").tokens[1:]


def test_a_line_number_is_one_token_with_its_newline() -> None:
    assert len(TOKENIZER.encode("\n7|").ids) == len(TOKENIZER.encode("\n12|").ids) == 2


def test_forms_of_a_word_are_spellings_of_that_word() -> None:
    table = spellings(TOKENIZER)
    ids = [TOKENIZER.encode(text).ids for text in (" name", "_name", "name", "12")]
    assert [len(i) for i in ids] == [1, 1, 1, 1]
    found = [table[i[0]] for i in ids]
    assert [spelling.word for spelling in found] == ["name", "name", "name", "12"]
    assert len({spelling.form for spelling in found}) == 4
    assert len(table) == TOKENIZER.get_vocab_size()


def test_training_examples_are_what_the_chat_template_writes(
    loaded: PreTrainedTokenizerBase,
) -> None:
    sessions = [s for family in FAMILIES for s in demo_sessions(family, count=3, seed=0)]
    for session, example in zip(sessions, encode(sessions, TOKENIZER), strict=True):
        messages = []
        for number, turn in enumerate(session.turns):
            messages.append({"role": "user", "content": turn.user})
            prompt = loaded.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            start = example.turns.index(number)
            assert example.token_ids[:start] == TOKENIZER.encode(prompt).ids
            messages.append({"role": "assistant", "content": turn.assistant})
        text = loaded.apply_chat_template(messages, tokenize=False)
        assert example.token_ids == TOKENIZER.encode(text).ids


def test_replies_are_marked_with_their_turn_and_end_with_eos() -> None:
    [session] = demo_sessions("code", count=1, seed=0)
    [example] = encode([session], Tokenizer.from_str(TOKENIZER.to_str()))
    for number, turn in enumerate(session.turns):
        reply = [
            token
            for token, where in zip(example.token_ids, example.turns, strict=True)
            if where == number
        ]
        assert reply[-1] == END_ID
        assert TOKENIZER.decode(reply[:-1]) == turn.assistant
