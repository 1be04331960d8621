"""Snapshots: files with the shared cache's outputs, from which a server starts warm.

A file has a head (magic, version, fingerprint of the tokenizer), pieces of outputs, and the SHA-256
of all that. A piece has four counts, the names of its namespaces as JSON, and its arrays,
little-endian.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from sglang_hvd.suffix_cache.outputs import SharedOutputs
from sglang_hvd.whole_file import check_place, replacing

_MAGIC = b"HVDCACHE"
_VERSION = 1
_HEAD = struct.Struct("<8sI16s")  # the magic, the version, the fingerprint
_COUNTS = struct.Struct("<III")  # bytes of the names, outputs, tokens
_DIGEST_BYTES = hashlib.sha256().digest_size
# The arrays of a piece: SharedOutputs' field, type, and whether it has an entry for each token.
_ARRAYS = (
    ("spaces", "<i4", False),
    ("lengths", "<i4", False),
    ("kept_at", "<i8", False),
    ("token_ids", "<i4", True),
)


def check_snapshot_place(path: Path) -> None:
    """Raises ValueError, in one line, if no snapshot can be written there, or if the file there is
    no snapshot."""
    check_place(path)
    try:
        with path.open("rb") as file:
            begin = file.read(len(_MAGIC))
    except OSError:  # there is none, or nobody may read it
        return
    if begin not in (b"", _MAGIC):
        raise ValueError(f"{path} is not a snapshot, and is not replaced: give another name")


def write_snapshot(path: Path, pieces: Iterable[SharedOutputs], *, fingerprint: str) -> None:
    """Writes outputs into a snapshot. Only the user can read a new file, because token ids are
    text. An old file stays until the new one is complete.

    fingerprint: 16 hex digits of the tokenizer (traces/tokenizer_json.py).

    Raises ValueError, in one line, if the file cannot be written, or if one of that name is no
    snapshot.
    """
    check_snapshot_place(path)
    digest = hashlib.sha256()
    with replacing(path, is_private=True) as file:
        head = _HEAD.pack(_MAGIC, _VERSION, fingerprint.encode())
        for part in chain([head], chain.from_iterable(map(_parts, pieces))):
            digest.update(part)
            file.write(part)
        file.write(digest.digest())


def read_snapshot(path: Path, *, fingerprint: str) -> list[SharedOutputs]:
    """The outputs of a snapshot, in pieces.

    fingerprint: of the tokenizer that is served.

    Raises ValueError, in one line, for a file that cannot be read, is cut or damaged, is of another
    version or of another tokenizer.
    """
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise ValueError(f"snapshot {path} cannot be read: {error.strerror}") from None
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise ValueError(f"{path} is not a snapshot of a cache")
    if len(content) < _HEAD.size + _DIGEST_BYTES:
        raise ValueError(f"snapshot {path} is cut off")
    _, version, written = _HEAD.unpack_from(content)
    if version != _VERSION:
        raise ValueError(
            f"snapshot {path} has version {version}, this sglang-hvd reads {_VERSION}: use the "
            "sglang-hvd that wrote it"
        )
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError(f"snapshot {path} is cut off or damaged: its checksum does not match")
    if written != fingerprint.encode():
        raise ValueError(
            f"snapshot {path} is of tokenizer {written.decode('ascii', 'replace')}, the one that "
            f"is served is {fingerprint}"
        )
    try:
        return list(_pieces(body[_HEAD.size :]))
    except (ValueError, struct.error) as error:  # written by something else
        raise ValueError(f"snapshot {path} is not sound: {error}") from None


def _parts(piece: SharedOutputs) -> Iterator[bytes | memoryview]:
    names = json.dumps(list(piece.namespaces)).encode()
    yield _COUNTS.pack(len(names), len(piece.lengths), len(piece.token_ids))
    yield names
    for name, kind, _ in _ARRAYS:
        yield np.ascontiguousarray(getattr(piece, name), kind).data


def _pieces(body: memoryview) -> Iterator[SharedOutputs]:
    while body:
        num_name_bytes, num_outputs, num_tokens = _COUNTS.unpack_from(body)
        names = json.loads(bytes(body[_COUNTS.size : _COUNTS.size + num_name_bytes]))
        body = body[_COUNTS.size + num_name_bytes :]
        arrays = {}
        for name, kind, is_of_tokens in _ARRAYS:
            array = np.frombuffer(body, kind, num_tokens if is_of_tokens else num_outputs)
            arrays[name] = array.astype(kind[1:])  # aligned, which the file is not
            body = body[array.nbytes :]
        yield SharedOutputs(names, **arrays)
