"""The tokenizer's file, its tokens as text, and its fingerprint."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from sglang_hvd.traces.tokenizer_json import (
    load_tokenizer,
    token_strings,
    tokenizer_fingerprint,
    vocabulary_fingerprint,
)


def test_every_token_id_has_its_text(tokenizer: Tokenizer, words: list[str]) -> None:
    assert token_strings(tokenizer) == [f" {word}" for word in words]  # it joins words by spaces


def test_words_of_sentencepiece_keep_the_space_before_them() -> None:
    vocabulary = {"<0x0A>": 0, "\u2581the": 1, "the": 2, "\u2581": 3, "\u2581\u2581if": 4, ",": 5}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    made.decoder = decoders.Sequence(  # as in the files of Llama 2 and Mistral 7B
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    assert made.decode([1]) == "the"
    assert token_strings(made) == ["\n", " the", "the", " ", "  if", ","]


def test_a_tokenizer_file_is_read_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    assert load_tokenizer(path).encode("b a").ids == [2, 1]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"{}", b"3", b'"a model"', b'{"model": {"type": "Nope"}}', b"[" * 100_000],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer.json"):
        load_tokenizer(path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the tokenizer: No such file"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_fingerprint_tells_vocabularies_apart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    known = tokenizer_fingerprint(tokenizer)
    assert len(known) == 16
    assert int(known, 16) >= 0
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    assert tokenizer_fingerprint(path) == known
    tokenizer.add_special_tokens([AddedToken("<more>")])
    assert tokenizer_fingerprint(tokenizer) != known


def test_a_fingerprint_depends_on_tokens_and_ids_alone() -> None:
    known = vocabulary_fingerprint({"a": 0, "b": 1})
    assert vocabulary_fingerprint({"b": 1, "a": 0}) == known
    others = [{"a": 1, "b": 0}, {"a": 0, "b": 2}, {"a": 0, "b ": 1}, {"a": 0}, {"a": 0, "c": 1}]
    fingerprints = {vocabulary_fingerprint(other) for other in others}
    assert len(fingerprints) == len(others)
    assert known not in fingerprints
