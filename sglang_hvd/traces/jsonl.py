"""Trace files as JSONL: a line for the header, one per record, and one for the end.

The last line has the number of records and the CRC-32 of everything before it, so that a file that
was cut or changed is told apart from a whole one.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sglang_hvd.traces.json_lines import json_object
from sglang_hvd.traces.record import Header, Labels, Record
from sglang_hvd.types import TokenIds

SUFFIX = ".jsonl"

_TOKEN_KEYS = {"prompt", "output"}
_END_KEYS = {"num_records", "crc32"}


def encode_header(header: Header) -> bytes:
    return _line(header.fields())


def encode_record(record: Record) -> bytes:
    new_ids = record.new_prompt_ids
    return _line(
        {
            **record.labels.fields(),
            "prompt": None if new_ids is None else new_ids.tolist(),
            "output": record.output_ids.tolist(),
        }
    )


def encode_end(num_records: int, crc32: int) -> bytes:
    """crc32: of all bytes before it."""
    return _line({"num_records": num_records, "crc32": crc32})


def decode(file: BinaryIO, path: Path) -> Iterator[tuple[str, Header | Record]]:
    """The header and the records, each with the place where it stands.

    Raises ValueError with file and line for anything that is not a whole file of this kind.
    """
    crc32 = num_records = 0
    is_ended = False
    where = f"{path}:1"
    for number, line in enumerate(file, start=1):
        where = f"{path}:{number}"
        if is_ended:
            raise ValueError(f"{where}: something stands behind the end of the recording")
        try:
            if not line.endswith(b"\n"):
                raise ValueError("the recording is cut off in this line")
            fields = json_object(line)
            if number == 1:
                yield where, Header.of_fields(fields)
            elif fields.keys() == _END_KEYS:
                if fields != {"num_records": num_records, "crc32": crc32}:
                    raise ValueError("the recording was changed: its end does not fit it")
                is_ended = True
            else:
                yield where, _record(fields)
                num_records += 1
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        crc32 = zlib.crc32(line, crc32)
    if not is_ended:
        raise ValueError(f"{where}: the recording is cut off: it has no end")


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _record(fields: dict[str, Any]) -> Record:
    if not fields.keys() >= _TOKEN_KEYS:
        raise ValueError("not a trace: it has no prompt or no output")
    prompt, output = fields.pop("prompt"), fields.pop("output")
    new_ids = None if prompt is None else _token_ids(prompt, "prompt")
    return Record(Labels.of_fields(fields), new_ids, _token_ids(output, "output"))


def _token_ids(values: object, name: str) -> TokenIds:
    is_list = isinstance(values, list) and all(type(value) is int for value in values)
    ids = np.array(values if is_list else [-1], dtype=object)
    if len(ids) and not (ids.min() >= 0 and ids.max() < 2**31):
        raise ValueError(f"not a trace: {name} is a list of token ids")
    return ids.astype(np.int32)
