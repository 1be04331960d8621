"""Recorded generations, and the reader of text traces (JSONL)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sglang_hvd.types import TokenIds

_KEYS = frozenset(
    ("family", "dataset", "licence", "source_repo", "session", "turn", "prompt_kind")
) | {"prompt", "output"}


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One generation: the whole prompt and what the target model generated from it.

    prompt_ids, output_ids: int32[num_tokens].
    session, turn: the conversation it belongs to, and its place there.
    family: kind of workload, as in the paper's section 4.1.
    """

    prompt_ids: TokenIds
    output_ids: TokenIds
    session: str
    turn: int
    family: str


@dataclass(frozen=True, slots=True)
class TextTrace:
    """One line of a trace file.

    is_delta: prompt is only what is new since the previous turn's output of the session.
    """

    family: str
    dataset: str
    licence: str
    source_repo: str
    session: str
    turn: int
    is_delta: bool
    prompt: str
    output: str


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json. Raises ValueError in one line if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        is_tokenizer = "model" in json.loads(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot read the tokenizer: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
        is_tokenizer = False
    if not is_tokenizer:
        raise ValueError(f"{path}: not a tokenizer.json")
    return Tokenizer.from_str(text)


def token_strings(tokenizer: Tokenizer) -> list[str]:
    """The decoded text of every token id, in order."""
    ids = [[token_id] for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True))]
    return tokenizer.decode_batch(ids, skip_special_tokens=False)


def read_text_traces(path: Path) -> Iterator[TextTrace]:
    """The lines of a trace file (one JSON object per line, sessions in order).

    Raises ValueError with file and line number for anything that is no such line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                yield _parse(line, f"{path}:{number}")
    except OSError as error:
        raise ValueError(f"{path}: cannot read the traces: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None


def tokenize(
    text_traces: Iterator[TextTrace], tokenizer: Tokenizer, *, eos_token_id: int | None
) -> Iterator[Trace]:
    """Turns lines, in their order, into traces with whole prompts.

    eos_token_id: ends every output; None: outputs end with their text.

    Raises ValueError if a delta does not follow the previous turn of its session.
    """
    history: list[int] = []
    previous: TextTrace | None = None
    for line in text_traces:
        is_next = previous is not None and line.session == previous.session
        if line.is_delta and line.turn > 0 and not is_next:
            raise ValueError(
                f"turn {line.turn} of session {line.session} does not follow a turn of its session"
            )
        if not (line.is_delta and is_next):
            history = []
        history += tokenizer.encode(line.prompt, add_special_tokens=False).ids
        output_ids = tokenizer.encode(line.output, add_special_tokens=False).ids
        prompt_ids = np.array(history, dtype=np.int32)
        history += output_ids
        if eos_token_id is not None:
            output_ids = [*output_ids, eos_token_id]
        yield Trace(
            prompt_ids=prompt_ids,
            output_ids=np.array(output_ids, dtype=np.int32),
            session=line.session,
            turn=line.turn,
            family=line.family,
        )
        previous = line


def _parse(line: str, where: str) -> TextTrace:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg}") from None
    if not isinstance(fields, dict) or not set(fields) >= _KEYS:
        raise ValueError(f"{where}: not a trace: wanted an object with {', '.join(sorted(_KEYS))}")
    if fields["prompt_kind"] not in ("delta", "full"):
        raise ValueError(f"{where}: prompt_kind is delta or full, got {fields['prompt_kind']!r}")
    return TextTrace(
        family=fields["family"],
        dataset=fields["dataset"],
        licence=fields["licence"],
        source_repo=fields["source_repo"],
        session=str(fields["session"]),
        turn=fields["turn"],
        is_delta=fields["prompt_kind"] == "delta",
        prompt=fields["prompt"],
        output=fields["output"],
    )
