"""Text traces (JSONL): prompts and outputs as text, later turns as what they add."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sglang_hvd.traces.json_object import json_object
from sglang_hvd.traces.trace import Trace

TEXT_TRACE_KEYS = frozenset(
    ("family", "dataset", "licence", "source_repo", "session", "turn", "prompt_kind")
) | {"prompt", "output"}


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


def read_text_traces(path: Path) -> Iterator[TextTrace]:
    """The lines of a trace file (one JSON object per line, sessions in order).

    Raises ValueError with file and line number for anything that is no such line, and for a delta
    that does not follow the previous turn of its session.
    """
    previous = None
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                trace = _parse(line, where)
                if _is_orphan(trace, previous):
                    raise ValueError(f"{where}: {_orphaned(trace)}")
                yield trace
                previous = trace
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
        if _is_orphan(line, previous):
            raise ValueError(_orphaned(line))
        if not (line.is_delta and _is_next(line, previous)):
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
        previous = line


def _is_next(line: TextTrace, previous: TextTrace | None) -> bool:
    return previous is not None and line.session == previous.session


def _is_orphan(line: TextTrace, previous: TextTrace | None) -> bool:
    return line.is_delta and line.turn > 0 and not _is_next(line, previous)


def _orphaned(line: TextTrace) -> str:
    return f"turn {line.turn} of session {line.session} does not follow a turn of its session"


def _digest(line: TextTrace) -> str:
    text = f"{len(line.prompt)} {line.prompt}{line.output}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _parse(line: str, where: str) -> TextTrace:
    try:
        fields = json_object(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not fields.keys() >= TEXT_TRACE_KEYS:
        raise ValueError(
            f"{where}: not a trace: wanted an object with {', '.join(sorted(TEXT_TRACE_KEYS))}"
        )
    if fields["prompt_kind"] not in ("delta", "full"):
        raise ValueError(f"{where}: prompt_kind is delta or full, got {fields['prompt_kind']!r}")
    for key, kind in (("turn", int), ("family", str), ("prompt", str), ("output", str)):
        if not isinstance(fields[key], kind):
            raise ValueError(f"{where}: {key} is of type {kind.__name__}, got {fields[key]!r}")
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
