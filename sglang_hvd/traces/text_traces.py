"""Reads files of text, with a JSON object in each line (JSONL), and the text traces in them.

A text trace is one turn of a session: its prompt and output as text. The prompt of a later turn may
be what it adds to the turns before it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sglang_hvd.traces.trace import Trace

_KEYS = frozenset(
    ("family", "dataset", "licence", "source_repo", "session", "turn", "prompt_kind")
) | {"prompt", "output"}


@dataclass(frozen=True, slots=True)
class TextTrace:
    """One line of a trace file.

    is_delta: the prompt is only what is new since the output of the session's previous turn.
    """

    family: str
    licence: str
    source_repo: str
    session: str
    turn: int
    is_delta: bool
    prompt: str
    output: str

    @property
    def has_history(self) -> bool:
        """Whether its prompt begins with all of the turn before it."""
        return self.is_delta and self.turn > 0

    def is_after(self, previous: "TextTrace | None") -> bool:
        """Whether `previous` is the turn before this one."""
        return previous is not None and (previous.session, previous.turn) == (
            self.session,
            self.turn - 1,
        )


def is_text_trace(first_line: Mapping[str, object]) -> bool:
    """Whether a file that begins with this object is meant as text traces: it has most keys."""
    return 2 * len(_KEYS & first_line.keys()) > len(_KEYS)


def read_text_traces(path: Path) -> Iterator[TextTrace]:
    """The lines of a trace file, with sessions in order.

    Raises ValueError with file and line number for anything that is no such line, for a delta that
    does not follow the previous turn of its session, and for a line whose family or licence differs
    from the lines before it.
    """
    previous = None
    for where, fields in read_objects(path):
        trace = _parse(fields, where)
        for name in ("family", "licence"):
            if previous is not None and getattr(trace, name) != getattr(previous, name):
                raise ValueError(
                    f"{where}: {name} {getattr(trace, name)!r} after {getattr(previous, name)!r}: "
                    f"give each a file of its own"
                )
        if trace.has_history and not trace.is_after(previous):
            raise ValueError(
                f"{where}: turn {trace.turn} of session {trace.session} does not follow the turn "
                f"before it"
            )
        yield trace
        previous = trace


def tokenize(
    text_traces: Iterator[TextTrace], tokenizer: Tokenizer, *, eos_token_id: int | None
) -> Iterator[Trace]:
    """Turns lines, in their order in the file, into traces with whole prompts.

    eos_token_id: ends every output; None: outputs end with their text.
    """
    history: list[int] = []
    for line in text_traces:
        if not line.has_history:
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
            text_digest=_digest(line),
        )


def json_object(line: str | bytes) -> dict[str, Any]:
    """The object in a line. Raises ValueError that says what the line holds instead."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError("not text") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"wanted an object, got {type(fields).__name__}")
    return fields


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with the file and line where it stands.

    Raises ValueError with file and line for anything that is no such line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                try:
                    fields = json_object(line)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
                yield where, fields
    except OSError as error:
        raise ValueError(f"{path}: cannot read the traces: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None


def check_text(text: str) -> None:
    """Raises ValueError for half of a surrogate pair: JSON can hold one, tokenizers refuse it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not text: half of a surrogate pair") from None


def _digest(line: TextTrace) -> str:
    text = f"{len(line.prompt)} {line.prompt}{line.output}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _parse(fields: dict[str, Any], where: str) -> TextTrace:
    if missing := sorted(_KEYS - fields.keys()):
        raise ValueError(f"{where}: a text trace without {', '.join(missing)}")
    if fields["prompt_kind"] not in ("delta", "full"):
        raise ValueError(f"{where}: prompt_kind is delta or full, got {fields['prompt_kind']!r}")
    texts = dict.fromkeys(("family", "dataset", "licence", "source_repo", "prompt", "output"), str)
    for key, kind in {"turn": int, **texts}.items():
        if not isinstance(fields[key], kind):
            raise ValueError(f"{where}: {key} is of type {kind.__name__}, got {fields[key]!r}")
    if fields["turn"] < 0:
        raise ValueError(f"{where}: turn is 0 or more, got {fields['turn']}")
    try:
        check_text(fields["prompt"] + fields["output"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return TextTrace(
        family=fields["family"],
        licence=fields["licence"],
        source_repo=fields["source_repo"],
        session=str(fields["session"]),
        turn=fields["turn"],
        is_delta=fields["prompt_kind"] == "delta",
        prompt=fields["prompt"],
        output=fields["output"],
    )
