"""Recordings: what is written is read back, and damage never passes unseen."""

import itertools
import json
import struct
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from sglang_hvd.traces import binary
from sglang_hvd.traces.reader import read_traces
from sglang_hvd.traces.record import FORMAT, Header, TurnTexts
from sglang_hvd.traces.tokenizer_json import tokenizer_fingerprint
from sglang_hvd.traces.trace import Trace
from sglang_hvd.traces.writer import TraceWriter
from tests.traces.made_up import HEADER, some_traces, trace, values_of

SESSION = [
    trace([1, 2, 3], [4, 5], sampling={"temperature": 0.5}),
    trace([9], [8], session="other"),
    trace([1, 2, 3, 4, 5, 6], [7], turn=1),
    trace([], [7, 7], turn=2, has_prompt=False),
]


def written(path: Path, traces: list[Trace]) -> bytes:
    with TraceWriter(path, **HEADER) as writer:
        for one in traces:
            writer.write(one)
    return path.read_bytes()


def refusal(path: Path) -> str:
    """The one line that says why a file cannot be read; it names the file."""
    with pytest.raises(ValueError) as error:  # noqa: PT011, what it says is looked at
        list(read_traces(path))
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message


@given(some_traces())
def test_what_is_written_is_read_back(traces: list[Trace]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "all.hvdt")
        written(path, traces)
        assert values_of(list(read_traces(path))) == values_of(traces)


@given(some_traces(), st.integers(0, 20))
def test_forgotten_texts_are_forgotten_alike(traces: list[Trace], max_tokens: int) -> None:
    written_texts, read_texts = TurnTexts(max_tokens), TurnTexts(max_tokens)
    for one in traces:
        num_kept = written_texts.num_kept(one.session, one.prompt_ids) if one.has_prompt else 0
        kept = read_texts.first(one.session, num_kept)
        assert kept is not None
        assert kept.tolist() == one.prompt_ids[:num_kept].tolist()
        written_texts.advance(one)
        read_texts.advance(one)
        assert sum(map(len, written_texts._texts.values())) <= max_tokens


def test_a_prompt_that_goes_on_is_stored_as_what_is_new(tmp_path: Path) -> None:
    text = np.random.default_rng(5).integers(0, 150_000, 20_000).tolist()
    once = len(written(tmp_path / "once.hvdt", [trace(text, [1])]))
    turns = [trace([*text, *([1, 2] * i)], [1], turn=i) for i in range(10)]
    assert len(written(tmp_path / "ten.hvdt", turns)) < once + 5000
    assert values_of(list(read_traces(tmp_path / "ten.hvdt"))) == values_of(turns)


def frame(body: bytes) -> bytes:
    return struct.pack("<II", len(body), zlib.crc32(body)) + body


def recording(header: object, *records: bytes) -> bytes:
    """A whole recording of these records."""
    content = binary.MAGIC + frame(b"H" + json.dumps(header).encode()) + b"".join(records)
    return content + binary.encode_end(len(records), zlib.crc32(content))


def record(labels: object, new_ids: Sequence[int] | None, output_ids: Sequence[int]) -> bytes:
    """A record as the format says, without what writes them."""
    text = json.dumps(labels).encode()
    num_new = 2**32 - 1 if new_ids is None else len(new_ids)
    ids = np.array([*(new_ids or ()), *output_ids], "<i4").tobytes()
    parts = (struct.pack("<I", len(text)), text, struct.pack("<I", num_new), ids)
    return frame(b"T" + zlib.compress(b"".join(parts)))


TEXT_HEADER = {
    **{"format": FORMAT, "version": 3},
    **{"model": "a model", "tokenizer": "0123456789abcdef"},
}
LABELS = {
    **{"session": "s", "turn": 0, "family": "chat", "sampling": {}, "namespace": ""},
    **{"is_cut": False, "num_kept": 0},
}
SESSION_RECORDS = [
    ({**LABELS, "sampling": {"temperature": 0.5}}, [1, 2, 3], [4, 5]),
    ({**LABELS, "session": "other"}, [9], [8]),
    ({**LABELS, "turn": 1, "num_kept": 5}, [6], [7]),
    ({**LABELS, "turn": 2}, None, [7, 7]),
]


def test_the_format_can_be_read_and_written_without_this_project(tmp_path: Path) -> None:
    path = tmp_path / "x.hvdt"
    whole = written(path, SESSION)
    at = len(binary.MAGIC)
    bodies = []
    while at < len(whole):
        length, crc32 = struct.unpack_from("<II", whole, at)
        bodies.append(whole[at + 8 : at + 8 + length])
        assert zlib.crc32(bodies[-1]) == crc32
        at += 8 + length
    assert json.loads(bodies[0].removeprefix(b"H")) == TEXT_HEADER
    for body, (labels, new_ids, output_ids) in zip(bodies[1:-1], SESSION_RECORDS, strict=True):
        content = zlib.decompress(body.removeprefix(b"T"))
        length = 4 + struct.unpack_from("<I", content)[0]
        assert json.loads(content[4:length]) == labels
        num_new = struct.unpack_from("<I", content, length)[0]
        assert num_new == (2**32 - 1 if new_ids is None else len(new_ids))
        assert np.frombuffer(content[length + 4 :], "<i4").tolist() == [
            *(new_ids or ()),
            *output_ids,
        ]
    assert struct.unpack("<QI", bodies[-1].removeprefix(b"E")) == (4, zlib.crc32(whole[:-21]))
    path.write_bytes(recording(TEXT_HEADER, *(record(*one) for one in SESSION_RECORDS)))
    assert values_of(list(read_traces(path))) == values_of(SESSION)


@pytest.mark.parametrize(("version", "lacks"), [(1, ["namespace", "is_cut"]), (2, ["is_cut"])])
def test_recordings_of_earlier_versions_are_read(
    tmp_path: Path, version: int, lacks: list[str]
) -> None:
    path = tmp_path / "x.hvdt"
    records = [
        record({name: labels[name] for name in labels.keys() - set(lacks)}, *ids)
        for labels, *ids in SESSION_RECORDS
    ]
    path.write_bytes(recording({**TEXT_HEADER, "version": version}, *records))
    assert values_of(list(read_traces(path))) == values_of(SESSION)


@given(st.data())
def test_a_cut_file_is_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.hvdt")
        whole = written(path, SESSION)
        length = data.draw(st.integers(0, len(whole) - 1))
        path.write_bytes(whole[:length])
        assert "empty" in refusal(path) or length > 0


def test_a_file_cut_after_a_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.hvdt"
    whole = written(path, SESSION)
    num_end_bytes = len(binary.encode_end(4, 0))
    path.write_bytes(whole[:-num_end_bytes])
    assert refusal(path) == f"{path}: record 5: the recording is cut off here"


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.hvdt"
    whole = written(path, SESSION)
    for at, bit in itertools.product(range(len(whole)), range(8)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << bit
        path.write_bytes(flipped)
        refusal(path)


def test_a_prompt_that_was_left_out_begins_with_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.hvdt"
    *before, (labels, *ids) = SESSION_RECORDS
    records = [record(*one) for one in [*before, ({**labels, "num_kept": 1}, *ids)]]
    path.write_bytes(recording(TEXT_HEADER, *records))
    assert refusal(path) == f"{path}: record 4: a prompt that was left out begins with 1 tokens"


def test_what_stands_after_the_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.hvdt"
    path.write_bytes(written(path, SESSION) * 2)
    assert "something stands after" in refusal(path)


def test_the_corrupt_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.hvdt"
    whole = written(path, SESSION)
    second = len(written(tmp_path / "y.hvdt", SESSION[:1])) - len(binary.encode_end(1, 0))
    path.write_bytes(whole[: second + 12] + b"\x00" + whole[second + 13 :])
    assert refusal(path) == f"{path}: record 2: corrupt: its checksum is wrong"


def test_records_that_changed_places_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.hvdt"
    header = binary.encode_header(Header(**HEADER))
    num_end_bytes = len(binary.encode_end(0, 0))
    frames = [
        written(path, [one])[len(header) : -num_end_bytes]
        for one in (trace([1], [2], session="x"), trace([3], [4], session="y"))
    ]
    end = binary.encode_end(2, zlib.crc32(header + b"".join(frames)))
    path.write_bytes(header + b"".join(frames) + end)
    assert len(list(read_traces(path))) == 2
    path.write_bytes(header + b"".join(reversed(frames)) + end)
    assert refusal(path) == f"{path}: end: corrupt: it does not fit the 2 records before it"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "corrupt: a frame of 0 bytes"),
        (b"X", "corrupt: not a record"),
        (b"Tnot compressed", "corrupt: not the content of a record"),
        (b"T" + zlib.compress(b"\x01"), "corrupt: not the content of a record"),
        (b"T" + zlib.compress(b"\xff\0\0\0{}"), "corrupt: not the content of a record"),
        (b"T" + zlib.compress(b"\2\0\0\0{}\1\0\0\0"), "corrupt: not the content of a record"),
        (b"T" + zlib.compress(b"\2\0\0\0[]\0\0\0\0"), "corrupt: not the content of a record"),
        (b"T" + zlib.compress(b"\2\0\0\0{}\0\0\0\0\xff\xff\xff\xff"), "corrupt: not the content"),
        (b"T" + zlib.compress(b"\2\0\0\0{}\0\0\0\0"), "not a trace: wanted family, is_cut"),
        (b"E", "corrupt: it does not fit the 0 records before it"),
    ],
)
def test_a_wrong_frame_with_a_right_checksum_is_refused(
    tmp_path: Path, body: bytes, says: str
) -> None:
    path = tmp_path / "x.hvdt"
    path.write_bytes(binary.encode_header(Header("", "")) + frame(body))
    assert says in refusal(path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": 4}, "version 4 of the format, this release reads 1, 2, 3"),
        ({"version": None}, "version None of the format, this release reads 1, 2, 3"),
        ({"model": 3}, "model and tokenizer of a header are strings"),
        ({"more": 1}, "a header has format, model, tokenizer, version, got"),
    ],
)
def test_a_header_of_another_release_is_refused(
    tmp_path: Path, fields: dict[str, object], says: str
) -> None:
    path = tmp_path / "x.hvdt"
    header = json.dumps({**Header("", "").fields(), **fields}).encode()
    path.write_bytes(binary.MAGIC + frame(b"H" + header))
    assert says in refusal(path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_kept": 1}, "the prompt begins with 1 tokens of an earlier turn of session 's'"),
        ({"num_kept": -1}, "num_kept cannot be -1"),
        ({"turn": True}, "turn cannot be True"),
        ({"session": 1}, "session cannot be 1"),
        ({"family": None}, "family cannot be None"),
        ({"namespace": 1}, "namespace cannot be 1"),
        ({"is_cut": 1}, "is_cut cannot be 1"),
        ({"sampling": {"top_k": "x"}}, "sampling cannot be {'top_k': 'x'}"),
        ({"more": 1}, "wanted family, is_cut, namespace, num_kept, sampling, session, turn, got"),
    ],
)
def test_wrong_labels_are_named_by_the_number_of_the_record(
    tmp_path: Path, fields: dict[str, object], says: str
) -> None:
    path = tmp_path / "x.hvdt"
    path.write_bytes(recording(TEXT_HEADER, record({**LABELS, **fields}, [1], [2])))
    assert says in refusal(path)
    assert refusal(path).startswith(f"{path}: record 1: ")


@pytest.mark.parametrize("header", [b"3", b"{", b"\xff", b"9" * 5000, b'{"a": 1}', b"[" * 100_000])
def test_a_foreign_header_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.hvdt"
    path.write_bytes(binary.MAGIC + frame(b"H" + header))
    assert refusal(path).startswith(f"{path}: header: ")


def test_a_record_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.hvdt"
    with TraceWriter(path, **HEADER) as writer:
        writer.write(trace([0] * 10_000, [1]))
    assert path.stat().st_size < 1000
    monkeypatch.setattr(binary, "_MAX_BYTES", 40_000)
    with pytest.raises(ValueError, match=r"record 1: corrupt: not the content of a record"):
        list(read_traces(path))


def test_a_recording_of_another_tokenizer_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path, tokenizer_file = tmp_path / "x.hvdt", tmp_path / "tokenizer.json"
    known = tokenizer_fingerprint(tokenizer)
    with TraceWriter(path, tokenizer_fingerprint=known) as writer:
        writer.write(trace([1], [2], model="", tokenizer_fingerprint=known))
    tokenizer.save(str(tokenizer_file))
    assert len(list(read_traces(path, tokenizer))) == 1
    assert len(list(read_traces(path, tokenizer_file))) == 1
    tokenizer.add_special_tokens([AddedToken("<more>")])
    with pytest.raises(ValueError, match=f"recorded with tokenizer {known}, the one given is"):
        list(read_traces(path, tokenizer))
