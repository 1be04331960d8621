"""Reads traces of every form. The content of a file tells its form."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from sglang_hvd.traces import binary
from sglang_hvd.traces.chat_logs import is_chat_log, read_chat_log
from sglang_hvd.traces.chat_templates import ChatTemplate
from sglang_hvd.traces.record import Header, Record, TurnTexts
from sglang_hvd.traces.text_traces import (
    is_text_trace,
    json_object,
    read_text_traces,
    tokenize,
)
from sglang_hvd.traces.tokenizer_json import load_tokenizer, tokenizer_fingerprint
from sglang_hvd.traces.trace import Trace


def read_traces(
    path: Path,
    tokenizer: Tokenizer | Path | None = None,
    eos_token_id: int | None = None,
    *,
    template: ChatTemplate | None = None,
) -> Iterator[Trace]:
    """The traces of a file, in its order.

    Forms: recordings (.hvdt), text traces, and chat logs as in the OpenAI API (see chat_logs).

    tokenizer: tokenizes text; a recording of another tokenizer is refused. May be None for
        recordings.
    eos_token_id: ends every output of a text form; None: outputs end with their text.
    template: renders chat logs. None: the chat template in the folder of the tokenizer's file, or
        ChatML for a tokenizer that was given without its file.

    Raises ValueError, in one line with file and line or record, for a file that is empty, cut off,
    corrupt, unreadable or of no known form. The error may come after some traces.
    """
    if isinstance(tokenizer, Path):
        template = template or ChatTemplate(tokenizer)
        tokenizer = load_tokenizer(tokenizer)
    first_line = _first_line(path)
    if not first_line:
        raise ValueError(f"{path}: empty: no traces")
    if _is_binary(first_line):
        yield from _read_recording(path, tokenizer)
        return
    try:
        first = json_object(first_line)
    except ValueError as error:
        raise ValueError(f"{path}:1: no traces: {error}") from None
    if not (is_chat_log(first) or is_text_trace(first)):
        raise ValueError(
            f"{path}:1: neither a recording, a text trace nor a chat log: its keys are "
            f"{', '.join(map(str, first)) or 'none'}"
        )
    if tokenizer is None:
        raise ValueError(f"{path}: text needs a tokenizer: give its tokenizer.json")
    if is_chat_log(first):
        traces = read_chat_log(
            path, tokenizer, template or ChatTemplate(), eos_token_id=eos_token_id
        )
    else:
        traces = tokenize(read_text_traces(path), tokenizer, eos_token_id=eos_token_id)
    fingerprint = tokenizer_fingerprint(tokenizer)
    for trace in traces:
        yield replace(trace, tokenizer_fingerprint=fingerprint)


def is_recording(path: Path) -> bool:
    """Whether a file is a recording. Raises ValueError if it cannot be read."""
    return _is_binary(_first_line(path))


def has_chats(path: Path) -> bool:
    """Whether a file is a chat log. Raises ValueError if it cannot be read."""
    try:
        return is_chat_log(json_object(_first_line(path)))
    except ValueError:
        return False


def _first_line(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.readline()
    except OSError as error:
        raise ValueError(f"{path}: cannot read the traces: {error.strerror}") from None


def _is_binary(first_line: bytes) -> bool:
    return first_line.startswith(binary.MAGIC[:4])


def _read_recording(path: Path, tokenizer: Tokenizer | None) -> Iterator[Trace]:
    texts = TurnTexts()
    try:
        with path.open("rb") as file:
            entries = binary.decode(file, path)
            where, header = next(entries)
            assert isinstance(header, Header), "a decoder yields the header first"
            if tokenizer is not None and header.tokenizer_fingerprint:
                _check_tokenizer(header.tokenizer_fingerprint, tokenizer, where)
            for where, record in entries:
                assert isinstance(record, Record), "a decoder yields the header once"
                try:
                    trace = record.trace(header, texts)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
                texts.advance(trace)
                yield trace
    except OSError as error:
        raise ValueError(f"{path}: cannot read the traces: {error.strerror}") from None


def _check_tokenizer(recorded: str, tokenizer: Tokenizer, where: str) -> None:
    given = tokenizer_fingerprint(tokenizer)
    if given != recorded:
        raise ValueError(
            f"{where}: recorded with tokenizer {recorded}, the one given is {given}: give the "
            "tokenizer.json of the recorded model; if its tokenizer_config.json adds tokens, the "
            "one that AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR) writes"
        )
