"""Replies survive a file, and the texts of their tokens make up the text of the reply."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sglang_hvd.view.replies import read_replies, replies_json, token_texts
from tests.view.test_reply_page import REPLY


@pytest.fixture(scope="module")
def bytes_tokenizer() -> Tokenizer:
    """Each byte is a token, so most characters take several."""
    vocabulary = {byte: place for place, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


@pytest.mark.parametrize(
    "text", ["", "a", "def f(): pass\n\n  x", "naïve 世界 🙂🙂!", "🙂" * 20, " leading"]
)
def test_the_texts_of_tokens_join_to_the_text(bytes_tokenizer: Tokenizer, text: str) -> None:
    token_ids = bytes_tokenizer.encode(text).ids
    texts = token_texts(token_ids, bytes_tokenizer.decode_batch)
    assert len(texts) == len(token_ids)
    assert "".join(texts) == text
    assert all(len(piece) <= 1 for piece in texts)


def test_a_tokenizer_that_drops_leading_spaces_loses_none_inside() -> None:
    words = ["a", " b", " c"]

    def decode_all(windows: list[list[int]]) -> list[str]:
        return ["".join(words[i] for i in window).lstrip(" ") for window in windows]

    assert token_texts([0, 1, 2, 1], decode_all) == ("a", " b", " c", " b")


def test_replies_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "replies.json"
    path.write_text(replies_json([REPLY, REPLY]))
    assert read_replies(path) == [REPLY, REPLY]


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: saved["replies"][0].pop(key)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda saved: saved.update(format="another"), "format: Input should be"),
        (lambda saved: saved.update(version=2), "version: Input should be 1"),
        (lambda saved: saved.update(replies=[]), "replies: List should have at least 1 item"),
        (_without("tokens"), "replies.0.tokens: Field required"),
        (
            lambda saved: saved["replies"][0]["cycles"][1].update(width="wide"),
            "replies.0.cycles.1.width: Input should be a valid integer",
        ),
        (
            lambda saved: saved["replies"][0]["cycles"][0].update(accepted=10**9),
            "replies.0.cycles.0.accepted: Input should be less than",
        ),
    ],
)
def test_another_file_is_refused_in_one_line(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], Any], fault: str
) -> None:
    saved = json.loads(replies_json([REPLY]))
    spoil(saved)
    path = tmp_path / "replies.json"
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="--save-json") as refused:
        read_replies(path)
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"1"])
def test_what_is_no_json_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "replies.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"replies\.json: ") as refused:
        read_replies(path)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="cannot read the replies: No such file"):
        read_replies(tmp_path / "none.json")
