"""Which form a file has is told by what it holds; what has none is refused."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sglang_hvd.traces.reader import read_texts, read_traces, text_files
from sglang_hvd.traces.text_traces import read_text_traces, tokenize
from sglang_hvd.traces.tokenizer_json import load_tokenizer, tokenizer_fingerprint
from sglang_hvd.traces.writer import TraceWriter
from tests.traces.made_up import trace, values_of

TEXT_TRACE = {
    **{"family": "chat", "dataset": "made up", "licence": "MIT", "source_repo": "nobody/nothing"},
    **{"session": "x", "turn": 0, "prompt_kind": "full", "prompt": "a b", "output": "c"},
}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def test_a_recording_is_told_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "x.hvdt"
    with TraceWriter(path) as writer:
        writer.write(trace([1], [2], model="", tokenizer_fingerprint=""))
    moved = path.rename(tmp_path / "recorded")
    assert [one.output_ids.tolist() for one in read_traces(moved)] == [[2]]


@pytest.mark.parametrize(("fields", "num_ids"), [(TEXT_TRACE, 2), (CHAT, 3)])
def test_text_gets_the_tokenizer_s_fingerprint_and_the_end_token(
    tmp_path: Path, tokenizer: Tokenizer, fields: dict[str, object], num_ids: int
) -> None:
    path = tmp_path / "x"
    path.write_text(json.dumps(fields) + "\n")
    [one] = read_traces(path, tokenizer, eos_token_id=0)
    assert one.output_ids[-1] == 0
    assert one.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    with pytest.raises(ValueError, match="text needs a tokenizer") as error:
        list(read_traces(path))
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ": empty: no traces"),
        (b"\n", ":1: no traces: not JSON"),
        (b"PK\x03\x04\xff\xff", ":1: no traces: not "),
        (b"\x89HVD", ": not a recording"),
        (b"[1]\n", ":1: no traces: wanted an object, got list"),
        (b"{}\n", ":1: neither a recording, a text trace nor a chat log: its keys are none"),
        (b'{"text": "a"}\n', ":1: neither a recording, .* its keys are text"),
        (b'{"format": "other"}\n', ":1: neither a recording, .* its keys are format"),
        (b"[" * 100_000, ":1: no traces: not JSON"),
    ],
)
def test_a_foreign_file_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, content: bytes, says: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}{says}") as error:
        list(read_traces(path, tokenizer))
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing: cannot read the traces: No such file"):
        list(read_traces(tmp_path / "missing"))
    with pytest.raises(ValueError, match="cannot read the traces: Is a directory"):
        list(read_traces(tmp_path))


def test_real_text_traces_are_read_as_ever(traces_dir: Path, tokenizer_file: Path) -> None:
    path = traces_dir / "open_chat__mtbench_specbench_vicuna.jsonl"
    tokenizer = load_tokenizer(tokenizer_file)
    fingerprint = tokenizer_fingerprint(tokenizer)
    expected = values_of(list(tokenize(read_text_traces(path), tokenizer, eos_token_id=151645)))
    read = values_of(list(read_traces(path, tokenizer_file, eos_token_id=151645)))
    assert read == [{**row, "tokenizer_fingerprint": fingerprint} for row in expected]


def test_texts_to_warm_a_cache_with_are_outputs_or_with_their_prompts(tmp_path: Path) -> None:
    path = tmp_path / "x.hvdt"
    first = list(range(100))
    with TraceWriter(path) as writer:
        for one in (
            trace(first, [1], model="", tokenizer_fingerprint=""),
            trace([*first, 1, 7], [2], turn=1, model="", tokenizer_fingerprint=""),
        ):
            writer.write(one)
    assert [text.tolist() for text, _ in read_texts(path)] == [[1], [2]]
    # A later turn repeats of its session only what a match needs.
    whole = [text.tolist() for text, _ in read_texts(path, with_prompts=True)]
    assert whole == [[*first, 1], [*first[-31:], 1, 7, 2]]


def test_token_ids_and_plain_text_are_texts_too(tmp_path: Path, tokenizer: Tokenizer) -> None:
    ids, plain = tmp_path / "ids.jsonl", tmp_path / "notes.md"
    ids.write_text('[1, 2]\n{"prompt_ids": [3], "output_ids": [4]}\n')
    assert [(text.tolist(), of) for text, of in read_texts(ids)] == [([1, 2], ""), ([4], "")]
    whole = [text.tolist() for text, _ in read_texts(ids, with_prompts=True)]
    assert whole == [[1, 2], [3, 4]]
    plain.write_text("a b\n" * 3000)
    found = list(read_texts(plain, tokenizer))
    assert sum(len(text) for text, _ in found) == 6000
    assert max(len(text) for text, _ in found) <= 4096
    assert {of for _, of in found} == {tokenizer_fingerprint(tokenizer)}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x", b"", ": empty"),
        ("x.jsonl", b"[1]\n[-1]\n", ":2: no token ids: token ids are not negative"),
        ("x.jsonl", b'[1]\n["a"]\n', ":2: no token ids: token ids are a list of integers"),
        ("x.jsonl", b"[1]\n[4294967296]\n", ":2: no token ids"),
        ("x.jsonl", b"[1]\n5\n", ":2: no token ids"),
        ("x.jsonl", b'{"a": 1}\n', ":1: neither a recording"),
        ("x.txt", b"\xff\xfe", ": not a text file"),
    ],
)
def test_what_is_no_text_to_warm_with_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, name: str, content: bytes, says: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says) as error:
        list(read_texts(path, tokenizer))
    assert "\n" not in str(error.value)


def test_files_to_warm_with_are_those_of_the_folder_that_are_complete(tmp_path: Path) -> None:
    for name in ("b.txt", "a.hvdt", "c.hvdt.part", ".hidden"):
        (tmp_path / name).touch()
    assert [file.name for file in text_files(tmp_path)] == ["a.hvdt", "b.txt"]
    assert text_files(tmp_path / "b.txt") == [tmp_path / "b.txt"]
    with pytest.raises(ValueError, match="No such file"):
        text_files(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file"):
        text_files(tmp_path / "empty")
