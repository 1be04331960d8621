"""Recordings and the names of their sessions, by which sessions of a training are recognised."""

import errno
import json
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from sglang_hvd.replay.core.recordings import (
    Recording,
    TraceTokenizer,
    find_recordings,
    held,
    session_fingerprints,
)
from sglang_hvd.traces.reader import read_traces
from sglang_hvd.traces.recording_folder import RecordingFolder
from sglang_hvd.traces.writer import TraceWriter
from tests.replay.conftest import WriteTraces
from tests.traces.made_up import trace
from tests.traces.test_recording_folder import another_process


def fingerprints(path: Path, tokenizer: TraceTokenizer) -> dict[str, str]:
    return session_fingerprints(Recording(path, None).traces(tokenizer))


def test_text_has_the_same_name_with_every_tokenizer_and_end_token(
    tmp_path: Path, number_tokenizer: Path, write_traces: WriteTraces
) -> None:
    other = tmp_path / "other.json"
    fields = json.loads(number_tokenizer.read_text())
    vocab = fields["model"]["vocab"]
    fields["model"]["vocab"] = dict(zip(vocab, reversed(vocab.values()), strict=True))
    other.write_text(json.dumps(fields))
    path = write_traces(tmp_path / "traces.jsonl")
    names = [
        fingerprints(path, TraceTokenizer(tokenizer, eos_token))
        for tokenizer in (number_tokenizer, other)
        for eos_token in (None, "<|im_end|>")
    ]
    assert len(set(names[0].values())) == 8
    assert all(others == names[0] for others in names)


@pytest.mark.parametrize("line", ["call", "conversation"])
def test_a_chat_has_a_name_of_its_text(tmp_path: Path, number_tokenizer: Path, line: str) -> None:
    user, reply = {"role": "user", "content": "5 6"}, {"role": "assistant", "content": "7"}
    fields = {
        "call": {"request": {"messages": [user]}, "response": {"choices": [{"message": reply}]}},
        "conversation": {"messages": [user, reply]},
    }[line]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(fields) + "\n")
    names = [
        fingerprints(path, TraceTokenizer(number_tokenizer, eos_token))
        for eos_token in (None, "<|im_end|>")
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("form", ["text", "recording"])
def test_sessions_can_be_named_without_their_tokens(
    form: str, tmp_path: Path, number_tokenizer: Path, write_traces: WriteTraces
) -> None:
    tokenizer = TraceTokenizer(number_tokenizer, None)
    path = write_traces(tmp_path / "text.jsonl")
    if form == "recording":
        recorded = tmp_path / "recorded.hvdt"
        with TraceWriter(recorded, tokenizer_fingerprint=tokenizer.fingerprint) as writer:
            for one in Recording(path, None).traces(tokenizer):
                writer.write(one)
        path = recorded
    recording = Recording(path, None)
    by_tokens = session_fingerprints(recording.traces(tokenizer))
    assert recording.session_fingerprints() == list(by_tokens.values())


def test_a_session_that_continues_in_another_file_keeps_its_name(
    tmp_path: Path, number_tokenizer: Path
) -> None:
    tokenizer = TraceTokenizer(number_tokenizer, None)
    of_model = {"model": "m", "tokenizer_fingerprint": tokenizer.fingerprint}
    folder = RecordingFolder(
        tmp_path / "recorded", max_file_bytes=1, max_total_bytes=1 << 20, max_file_seconds=1000
    )
    prompt = [*range(1, 30)]
    for turn in range(2):
        folder.write(trace(prompt, [7, 8], session="a", turn=turn, **of_model))
        prompt += [7, 8, 40]
    folder.complete()
    first, second = sorted((tmp_path / "recorded").iterdir())
    assert fingerprints(first, tokenizer) == fingerprints(second, tokenizer)
    # Other recordings may give the same names to their sessions.
    other = tmp_path / "other.hvdt"
    with TraceWriter(other, **of_model) as writer:
        writer.write(trace([9, 9, 9], [1], session="a", **of_model))
    assert fingerprints(other, tokenizer)["a"] != fingerprints(first, tokenizer)["a"]


def test_recordings_can_be_read_although_their_server_removes_them(
    tmp_path: Path, number_tokenizer: Path
) -> None:
    tokenizer = TraceTokenizer(number_tokenizer, None)
    folder, recorded = tmp_path / "recorded", {"tokenizer_fingerprint": tokenizer.fingerprint}
    writing = RecordingFolder(
        folder, max_file_bytes=1, max_total_bytes=1 << 20, max_file_seconds=1000
    )
    for number in range(3):
        writing.write(trace([number], [1], session=str(number), model="", **recorded))
    writing.complete()
    found = find_recordings(folder)
    found[0].path.unlink()
    with held(found) as kept:
        assert [recording.name for recording in kept] == [r.name for r in found[1:]]
        for recording in kept:
            recording.path.unlink()
        sessions = [one.session for recording in kept for one in recording.traces(tokenizer)]
        assert sessions == ["1", "2"]
        # Errors name the file as the user knows it.
        assert kept[0].link is not None
        kept[0].link.write_bytes(b"x")
        with pytest.raises(ValueError, match=f"^{kept[0].path}:1: no traces"):
            kept[0].traces(tokenizer)
    assert list(folder.iterdir()) == []


def test_files_that_no_server_writes_are_read_where_they_are(
    tmp_path: Path, write_traces: WriteTraces
) -> None:
    write_traces(tmp_path / "text.jsonl")
    found = find_recordings(tmp_path)
    with held(found) as kept:
        assert kept == found
        assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


def test_no_file_may_have_the_name_of_the_mean(tmp_path: Path, write_traces: WriteTraces) -> None:
    write_traces(tmp_path / "mean.jsonl")
    with pytest.raises(
        ValueError, match=r"mean\.jsonl: results use the name mean .*: rename the file"
    ):
        find_recordings(tmp_path)


def test_the_turns_of_a_session_share_the_memory_of_their_prompts(
    tmp_path: Path, number_tokenizer: Path
) -> None:
    path, unknown = tmp_path / "long.hvdt", {"model": "", "tokenizer_fingerprint": ""}
    with TraceWriter(path, **unknown) as writer:
        for turn in range(3):
            writer.write(trace(range(10 + turn), [1], turn=turn, **unknown))
    *_, before, last = Recording(path, None).traces(TraceTokenizer(number_tokenizer, None))
    assert np.shares_memory(before.prompt_ids, last.prompt_ids)


def test_no_two_files_may_have_one_name_in_results(
    tmp_path: Path, write_traces: WriteTraces
) -> None:
    write_traces(tmp_path / "chats.jsonl")
    with TraceWriter(tmp_path / "chats.hvdt"):
        pass
    with pytest.raises(ValueError, match=r"chats\.jsonl: results .* and chats\.hvdt chats: ren"):
        find_recordings(tmp_path)


def test_a_folder_that_cannot_be_listed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)  # root may list every folder
    with pytest.raises(ValueError, match=f"{tmp_path}: cannot read the folder: Permission denied"):
        find_recordings(tmp_path)


def test_a_folder_without_complete_recordings_has_another_message_than_an_empty_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=r"no traces .*: give another folder"):
        find_recordings(tmp_path)
    writing = RecordingFolder(
        tmp_path, max_file_bytes=1 << 20, max_total_bytes=1 << 21, max_file_seconds=1000
    )
    writing.write(trace([1], [2]))
    with pytest.raises(ValueError, match=r": 1 recording\(s\) are still being written.*an hour"):
        find_recordings(tmp_path)
    writing.complete()
    assert len(find_recordings(tmp_path)) == 1


def test_recordings_that_a_killed_server_left_unfinished_are_read_too(tmp_path: Path) -> None:
    with another_process(tmp_path, "kill") as process:
        assert process.wait(60) == -9
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    [recording] = find_recordings(tmp_path)
    assert recording.path.suffix == ".hvdt"
    assert len(list(read_traces(recording.path))) == 3


@pytest.mark.parametrize(
    ("licence", "is_permissive"),
    [
        ("MIT", True),
        ("Apache-2.0 (repo); source texts keep their own terms", True),
        ("MIT (repo); HotpotQA CC BY-SA 4.0", True),
        ("MIT (repo); Alpaca instructions CC BY-NC 4.0", False),
        ("GPL-3.0", False),
    ],
)
def test_only_permissive_recordings_ship(
    tmp_path: Path, write_traces: WriteTraces, licence: str, is_permissive: bool
) -> None:
    path = write_traces(tmp_path / "one.jsonl", licence=licence)
    [recording] = find_recordings(path)
    assert isinstance(recording, Recording)
    assert recording.is_permissive is is_permissive
