"""Replies whose tokens tell where they came from: made from a server's answers, kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from sglang_hvd.view.cycles import Cycle, TokenSource, first_fault, sources_of

# Tokens before a token that may change its text: characters that take several tokens, and spaces.
_NUM_BEFORE = 8


@dataclass(frozen=True, slots=True)
class ViewedReply:
    """One reply of a server.

    title: names the reply in one line, such as its question.
    about: what served it, such as the policy; may be empty.
    prompt: the text that was sent.
    tokens: text of each output token. A character of several tokens stands at the last of them.
    cycles: the decoding cycles.
    seconds: from request to answer, prefill included; None if not known.
    """

    title: str
    about: str
    prompt: str
    tokens: tuple[str, ...]
    cycles: tuple[Cycle, ...]
    seconds: float | None = None

    @property
    def sources(self) -> list[TokenSource]:
        """The source of each token."""
        return sources_of(self.cycles, len(self.tokens))


def token_texts(
    token_ids: Sequence[int], decode_all: Callable[[list[list[int]]], Sequence[str]]
) -> tuple[str, ...]:
    """What each token adds to a text. Decoding one token by itself would lose leading spaces with
    some tokenizers, and characters that take several tokens with all.

    decode_all: the texts of several lists of tokens, such as a tokenizer's batch_decode.
    """
    windows: list[list[int]] = []
    for end in range(len(token_ids)):
        begin = max(0, end - _NUM_BEFORE)
        windows += [list(token_ids[begin:end]), list(token_ids[begin : end + 1])]
    # The first window is empty. Some servers decode no empty list.
    decoded = ["", *decode_all(windows[1:])] if windows else []
    # U+FFFD stands for a character that has begun.
    texts = [text.rstrip("\ufffd") for text in decoded]
    return tuple(
        after[len(before) :] for before, after in zip(texts[::2], texts[1::2], strict=True)
    )


def replies_json(replies: Iterable[ViewedReply]) -> str:
    """The replies as `sglang-hvd view --save-json` writes them."""
    return json.dumps(asdict(_Saved("sglang_hvd.replies", 1, list(replies))), indent=1)


def read_replies(path: Path) -> list[ViewedReply]:
    """The replies of a file that replies_json made.

    Raises ValueError, in one line, if the file cannot be read or is another.
    """
    try:
        saved = _SAVED.validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ValueError(f"{path}: cannot read the replies: {error.strerror}") from None
    except ValidationError as error:
        raise ValueError(
            f"{path}: {first_fault(error)}: give a file that `sglang-hvd view --save-json` wrote"
        ) from None
    return saved.replies


@dataclass(frozen=True, slots=True)
class _Saved:
    """The JSON object of a file."""

    format: Literal["sglang_hvd.replies"]
    version: Literal[1]
    replies: Annotated[list[ViewedReply], Field(min_length=1)]


_SAVED = TypeAdapter(_Saved)
