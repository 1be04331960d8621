"""Writing a trace file."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import ModuleType, TracebackType

from sglang_hvd.traces import binary, jsonl
from sglang_hvd.traces.part_file import PartFile
from sglang_hvd.traces.record import Header, Record
from sglang_hvd.traces.trace import Trace
from sglang_hvd.traces.turn_texts import TurnTexts


class TraceWriter:
    """Writes traces of one model and tokenizer; the file has its name only when it is whole.

    As a context manager it completes the file at the end, and leaves nothing after an exception.
    Between turns of one session other sessions may come.

    path: ends in .hvdt (compact) or .jsonl (text).

    Raises OSError where the file system refuses; after one of `write` the traces before it can
    still be completed.
    """

    def __init__(self, path: Path, *, model: str = "", tokenizer_fingerprint: str = "") -> None:
        self._encoding = _encoding_of(path)
        self._header = Header(model, tokenizer_fingerprint)
        self._texts = TurnTexts()
        self._num_records = 0
        self._crc32 = 0
        self._file = PartFile(path)
        try:
            self._append(self._encoding.encode_header(self._header))
        except OSError:
            self.discard()
            raise

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.close()
        except OSError:
            self.discard()
            raise

    @property
    def num_bytes(self) -> int:
        """Length of the file so far."""
        return self._file.num_bytes

    @property
    def num_records(self) -> int:
        return self._num_records

    def fits(self, trace: Trace) -> bool:
        """Whether the trace is of this file's model and tokenizer."""
        return Header(trace.model, trace.tokenizer_fingerprint) == self._header

    def write(self, trace: Trace) -> None:
        if not self.fits(trace):
            raise ValueError(
                f"{self._file.path}: a file has traces of one model and tokenizer, "
                f"{self._header}, got {Header(trace.model, trace.tokenizer_fingerprint)}"
            )
        self._append(self._encoding.encode_record(Record.of_trace(trace, self._texts)))
        self._texts.advance(trace)
        self._num_records += 1

    def close(self) -> None:
        """Completes the file. After an OSError it is to be left or discarded."""
        self._append(self._encoding.encode_end(self._num_records, self._crc32))
        self._file.complete()

    def discard(self) -> None:
        """Ends writing without a file."""
        self._file.discard()

    def leave(self) -> None:
        """Ends writing without completing the file: its part stays, to be salvaged."""
        self._file.leave()

    def _append(self, data: bytes) -> None:
        self._file.append(data)
        self._crc32 = zlib.crc32(data, self._crc32)


def _encoding_of(path: Path) -> ModuleType:
    for encoding in (binary, jsonl):
        if path.suffix == encoding.SUFFIX:
            return encoding
    raise ValueError(f"{path}: traces are written as {binary.SUFFIX} or {jsonl.SUFFIX}")
