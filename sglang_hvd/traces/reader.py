"""Reads traces of every form. The content of a file tells its form."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
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
from sglang_hvd.types import TokenIds

# Plain text is cut into texts of so many tokens, because a cache drops whole texts.
_PLAIN_TOKENS = 4096
# Lines of plain text that are tokenized at once.
_PLAIN_LINES = 1024
# Tokens of a session's earlier turns that are repeated, so that matches can go across.
_OVERLAP = 32


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


def read_texts(
    path: Path,
    tokenizer: Tokenizer | None = None,
    eos_token_id: int | None = None,
    *,
    template: ChatTemplate | None = None,
    with_prompts: bool = False,
) -> Iterator[tuple[TokenIds, str]]:
    """The texts of a file with which to warm a cache, each with the fingerprint of its tokenizer.

    Of the forms of read_traces, the outputs. Token ids in JSON lines: a list of them, or an object
    with `output_ids` and, if there is one, `prompt_ids`. Any other file is plain text.

    tokenizer, eos_token_id, template: see read_traces. Token ids have an empty fingerprint if there
        is no tokenizer.
    with_prompts: texts begin with their prompts, without what the turns before had.

    Raises ValueError as read_traces does.
    """
    first_line = _first_line(path)
    if not first_line:
        raise ValueError(f"{path}: empty: nothing to warm a cache with")
    is_ids = _is_token_ids(first_line)
    fingerprint = "" if tokenizer is None else tokenizer_fingerprint(tokenizer)
    if not is_ids and _has_traces(path, first_line):
        traces = read_traces(path, tokenizer, eos_token_id, template=template)
        texts: Iterable[tuple[TokenIds, TokenIds, str]] = (
            (trace.prompt_ids, trace.output_ids, trace.tokenizer_fingerprint) for trace in traces
        )
    elif is_ids:
        texts = ((*ids, fingerprint) for ids in _token_ids(path))
    elif tokenizer is None:
        raise ValueError(f"{path}: text needs a tokenizer: give its tokenizer.json")
    else:
        yield from ((text, fingerprint) for text in _plain_texts(path, tokenizer))
        return
    before = np.empty(0, np.int32)
    for prompt_ids, output_ids, of_tokenizer in texts:
        if not with_prompts:
            yield output_ids, of_tokenizer
            continue
        text = np.concatenate([prompt_ids, output_ids])
        yield text[max(0, _num_common(before, text) - _OVERLAP) :], of_tokenizer
        before = text


def text_files(path: Path) -> list[Path]:
    """The files of a folder that read_texts may read, sorted by name, or the one file. Recordings
    that are still written are left out.

    Raises ValueError, in one line, if there are none or they cannot be listed.
    """
    try:
        found = sorted(path.iterdir()) if path.is_dir() else [path]
        path.stat()
    except OSError as error:
        raise ValueError(f"{path}: cannot read the texts: {error.strerror}") from None
    files = [
        file
        for file in found
        if file == path or (file.is_file() and file.name[0] != "." and file.suffix != ".part")
    ]
    if not files:
        raise ValueError(f"{path}: there is no file in the folder")
    return files


def is_recording(path: Path) -> bool:
    """Whether a file is a recording. Raises ValueError if it cannot be read."""
    return _is_binary(_first_line(path))


def has_chats(path: Path) -> bool:
    """Whether a file is a chat log. Raises ValueError if it cannot be read."""
    try:
        return is_chat_log(json_object(_first_line(path)))
    except ValueError:
        return False


def _has_traces(path: Path, first_line: bytes) -> bool:
    if _is_binary(first_line) or path.suffix in (".jsonl", binary.SUFFIX):
        return True  # otherwise read_traces says what is wrong
    try:
        first = json_object(first_line)
    except ValueError:
        return False
    return is_chat_log(first) or is_text_trace(first)


def _is_token_ids(first_line: bytes) -> bool:
    try:
        first = json.loads(first_line)
    except ValueError:
        return False
    return isinstance(first, list) or (isinstance(first, dict) and "output_ids" in first)


def _token_ids(path: Path) -> Iterator[tuple[TokenIds, TokenIds]]:
    """Prompt and output of each line. Raises ValueError with file and line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                fields = json.loads(line)
                if isinstance(fields, list):
                    fields = {"output_ids": fields}
                ids = [_ids(fields.get(name, [])) for name in ("prompt_ids", "output_ids")]
            except (ValueError, AttributeError, OverflowError) as error:
                raise ValueError(f"{path}:{number}: no token ids: {error}") from None
            yield ids[0], ids[1]


def _ids(values: object) -> TokenIds:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError("token ids are a list of integers")
    ids = np.array(values, np.int32)
    if ids.min(initial=0) < 0:
        raise ValueError("token ids are not negative")
    return ids


def _plain_texts(path: Path, tokenizer: Tokenizer) -> Iterator[TokenIds]:
    try:
        with path.open(encoding="utf-8") as file:
            while lines := list(islice(file, _PLAIN_LINES)):
                ids = tokenizer.encode("".join(lines), add_special_tokens=False).ids
                for start in range(0, len(ids), _PLAIN_TOKENS):
                    yield np.array(ids[start : start + _PLAIN_TOKENS], np.int32)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None


def _num_common(before: TokenIds, text: TokenIds) -> int:
    """How many tokens both begin with."""
    num = min(len(before), len(text))
    differs = np.flatnonzero(before[:num] != text[:num])
    return int(differs[0]) if len(differs) else num


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
