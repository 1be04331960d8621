"""Encodes and decodes recordings: a magic number, then frames for the header, records and end.

    magic     8 bytes
    frame     uint32 length of the body, uint32 CRC-32 of the body, body
    body      kind (1 byte) and content:
      H       the header, JSON
      T       a record, zlib: uint32 length of its labels, labels as JSON, uint32 number of new
              prompt tokens, the new prompt tokens, the output's tokens
      E       uint64 number of records, uint32 CRC-32 of everything before the frame

All numbers are little-endian, tokens are int32. If the prompt was left out, its number of tokens is
2**32 - 1.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sglang_hvd.traces.record import Header, Labels, Record
from sglang_hvd.traces.text_traces import json_object
from sglang_hvd.types import TokenIds

SUFFIX = ".hvdt"

# As in PNG files: a transfer that changes line ends or drops the eighth bit breaks it.
MAGIC = b"\x89HVDT\r\n\x1a"

_FRAME = struct.Struct("<II")
_COUNT = struct.Struct("<I")
_END = struct.Struct("<QI")
_LEFT_OUT = 2**32 - 1
_MAX_BYTES = 1 << 30  # of a body, and of a record's content


@dataclass(frozen=True, slots=True)
class WholePart:
    """How much of a file whose writer was killed can be kept.

    num_bytes: length up to the end of the last whole frame; 0 if the header is not whole.
    crc32: checksum of these bytes.
    is_ended: whether the end was written too.
    """

    num_bytes: int
    num_records: int
    crc32: int
    is_ended: bool


def encode_header(header: Header) -> bytes:
    return MAGIC + _frame(b"H", json.dumps(header.fields()).encode())


def encode_record(record: Record) -> bytes:
    labels = json.dumps(record.labels.fields(), separators=(",", ":")).encode()
    new_ids = record.new_prompt_ids
    content = b"".join(
        (
            _COUNT.pack(len(labels)),
            labels,
            _COUNT.pack(_LEFT_OUT if new_ids is None else len(new_ids)),
            b"" if new_ids is None else _token_bytes(new_ids),
            _token_bytes(record.output_ids),
        )
    )
    assert len(content) <= _MAX_BYTES, f"a record of {len(content)} bytes"
    return _frame(b"T", zlib.compress(content))


def encode_end(num_records: int, crc32: int) -> bytes:
    """crc32: checksum of all bytes before the end."""
    return _frame(b"E", _END.pack(num_records, crc32))


def decode(file: BinaryIO, path: Path) -> Iterator[tuple[str, Header | Record]]:
    """The header and the records, each with the place where it stands.

    Raises ValueError with file and record for anything that is not a whole recording.
    """
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise ValueError(f"{path}: not a recording: its magic number is missing")
    crc32 = zlib.crc32(magic)
    num_records = 0
    where = f"{path}: header"
    try:
        kind, content, crc32 = _read_frame(file, crc32)
        if kind != b"H":
            raise ValueError("corrupt: another frame stands in its place")
        yield where, Header.of_fields(json_object(content))
        while True:
            where = f"{path}: record {num_records + 1}"
            before = crc32
            kind, content, crc32 = _read_frame(file, crc32)
            if kind == b"E":
                break
            if kind != b"T":
                raise ValueError("corrupt: not a record")
            yield where, _record(content)
            num_records += 1
        where = f"{path}: end"
        if content != _END.pack(num_records, before):
            raise ValueError(f"corrupt: it does not fit the {num_records} records before it")
        if file.read(1):
            raise ValueError("something stands after it")
    except EOFError:
        raise ValueError(f"{where}: the recording is cut off here") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def whole_part(file: BinaryIO) -> WholePart:
    """Walks a file that may end anywhere. Records are checked by their CRC and not decoded."""
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        return WholePart(0, 0, 0, is_ended=False)
    part = WholePart(0, -1, zlib.crc32(magic), is_ended=False)  # -1: the header is no record
    while not part.is_ended:
        try:
            kind, _, crc32 = _read_frame(file, part.crc32)
        except (EOFError, ValueError):
            break
        is_ended = kind == b"E"
        num_records = part.num_records if is_ended else part.num_records + 1
        part = WholePart(file.tell(), num_records, crc32, is_ended)
    return part if part.num_bytes else WholePart(0, 0, 0, is_ended=False)


def _frame(kind: bytes, content: bytes) -> bytes:
    body = kind + content
    assert len(body) <= _MAX_BYTES, f"a record of {len(body)} bytes"
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def _read_frame(file: BinaryIO, crc32: int) -> tuple[bytes, bytes, int]:
    """Kind and content of the next frame, and the file's CRC-32 up to its end.

    Raises EOFError if the file ends before the frame does, ValueError if the frame is corrupt.
    """
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        raise EOFError
    length, expected = _FRAME.unpack(head)
    if not 1 <= length <= _MAX_BYTES:
        raise ValueError(f"corrupt: a frame of {length} bytes")
    body = file.read(length)
    if len(body) < length:
        raise EOFError
    if zlib.crc32(body) != expected:
        raise ValueError("corrupt: its checksum is wrong")
    return body[:1], body[1:], zlib.crc32(body, zlib.crc32(head, crc32))


def _record(compressed: bytes) -> Record:
    try:
        decompressor = zlib.decompressobj()
        content = decompressor.decompress(compressed, _MAX_BYTES)
        if not decompressor.eof:
            raise ValueError("cut off, or larger than records are")
        [num_label_bytes] = _COUNT.unpack_from(content)
        first = _COUNT.size + num_label_bytes
        labels = json_object(content[_COUNT.size : first])
        [num_new] = _COUNT.unpack_from(content, first)
        first += _COUNT.size
        ids = np.frombuffer(content, dtype="<i4", offset=first).astype(np.int32, copy=False)
    except (zlib.error, struct.error, ValueError):
        raise ValueError("corrupt: not the content of a record") from None
    num_stored = 0 if num_new == _LEFT_OUT else num_new
    if num_stored > len(ids) or (len(ids) and ids.min() < 0):
        raise ValueError("corrupt: not the content of a record")
    new_ids = None if num_new == _LEFT_OUT else ids[:num_stored]
    return Record(Labels.of_fields(labels), new_ids, ids[num_stored:])


def _token_bytes(token_ids: TokenIds) -> bytes:
    return token_ids.astype("<i4", copy=False).tobytes()
