"""Texts enter the cache between the steps of a server, and no failure of that ends the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.warming import warm_up as warm_up_module
from sglang_hvd.plugin.warming.text_pipe import (
    PIECE_TOKENS,
    TextPiece,
    pieces_of,
    read_piece,
    write_piece,
)
from sglang_hvd.plugin.warming.warm_up import WarmUp
from sglang_hvd.suffix_cache import SuffixCache
from tests.e2e.forked_server import Nursery
from tests.plugin.two_ranks import found_by_ranks, run_as_rank

VOCAB_SIZE, EOS = 1000, 3
HANGS_AFTER_S = 600.0


def save_tokenizer(folder: Path) -> int | None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "<eos>": EOS}, unk_token="c"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    return EOS


def without_tokenizer(folder: Path) -> int | None:
    raise OSError("there is no tokenizer\nin several lines")


def cache_of(*, background: bool = True) -> SuffixCache:
    return SuffixCache(shared_cache_tokens=2**28, background=background)


def warm_up_of(
    source: Path,
    cache: SuffixCache,
    *,
    save: Callable[[Path], int | None] = save_tokenizer,
    ranks: RankGroup | None = None,
) -> WarmUp:
    return WarmUp(
        source, cache, ranks=ranks or RankGroup(), save_tokenizer=save, vocab_size=VOCAB_SIZE
    )


def finished(warm_up: WarmUp, *, is_idle: bool = True) -> dict[str, Any]:
    """Goes on until the warm-up has ended, and returns its description as JSON values."""
    deadline = time.monotonic() + HANGS_AFTER_S
    while not warm_up.describe()["is_done"]:
        assert time.monotonic() < deadline, "the warm-up hangs"
        warm_up.go_on(is_idle=is_idle)
        time.sleep(0.001)
    return dict(json.loads(json.dumps(warm_up.describe())))


def token_lines(path: Path, num_texts: int, length: int = 1000) -> Path:
    path.write_text((json.dumps([7] * length) + "\n") * num_texts)
    return path


def held(cache: SuffixCache) -> int:
    cache.drain()
    return cache.stats().num_shared_tokens


def test_texts_of_every_form_enter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "ids.jsonl").write_text('[1, 2]\n{"prompt_ids": [7], "output_ids": [3, 4, 5]}\n')
    (folder / "plain.txt").write_text("a b\nc a\n")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b a"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    cache = cache_of()
    with caplog.at_level("INFO"):
        state = finished(warm_up_of(folder, cache))
    assert held(cache) == 2 + 3 + 4 + 3
    seconds = state.pop("seconds")
    assert state == {
        **{"path": str(folder), "num_files": 3, "num_files_read": 3, "num_tokens": 12},
        **{"is_done": True, "error": None},
    }
    assert seconds > 0
    assert f"warm-up is done: {folder}: 3 of 3 files, 12 tokens" in caplog.text


def test_a_step_hands_over_one_piece(tmp_path: Path) -> None:
    cache = cache_of(background=False)
    warm_up = warm_up_of(token_lines(tmp_path / "ids.jsonl", 40), cache)
    before, added = 0, set()
    while not warm_up.describe()["is_done"]:
        warm_up.go_on(is_idle=False)
        now = held(cache)
        added.add(now - before)
        before = now
    assert before == 40_000
    assert max(added) == 5_000  # the texts with which a piece reaches its size
    assert max(added) - 1000 < PIECE_TOKENS


@pytest.mark.parametrize(
    ("cache", "max_tokens"),
    [
        # Until so many tokens wait, and the rest of the piece that reaches them.
        (cache_of(), 64 * 1024 + 5_000),
        (SuffixCache(deterministic=True), 10_000),
        (cache_of(background=False), 10_000),
        (SuffixCache.as_in_paper(), 10_000),
    ],
)
def test_a_request_that_ends_a_sleep_waits_for_few_tokens(
    tmp_path: Path, cache: SuffixCache, max_tokens: int
) -> None:
    warm_up = warm_up_of(token_lines(tmp_path / "ids.jsonl", 500), cache)
    assert warm_up._reader is not None
    deadline = time.monotonic() + HANGS_AFTER_S
    while not warm_up._reader._received.full():  # the server sleeps
        assert time.monotonic() < deadline, "the reading process hangs"
        time.sleep(0.001)
    warm_up.go_on(is_idle=True)
    assert max_tokens - 5_000 <= warm_up.describe()["num_tokens"] <= max_tokens
    assert finished(warm_up)["num_tokens"] == 500_000


def test_what_cannot_be_read_ends_the_warm_up_and_keeps_the_texts_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    token_lines(folder / "1.jsonl", 20)
    (folder / "2.jsonl").write_text("[1, 2]\n[1, -2]\n")
    token_lines(folder / "3.jsonl", 20)
    cache = cache_of()
    warm_up = warm_up_of(folder, cache)
    state = finished(warm_up)
    assert state["error"] == f"{folder}/2.jsonl:2: no token ids: token ids are not negative"
    assert (state["num_files"], state["num_files_read"], state["num_tokens"]) == (3, 1, 20_002)
    assert held(cache) == 20_002
    warm_up.go_on(is_idle=True)
    assert warm_up.describe()["num_tokens"] == 20_002
    assert "warm-up ended early" in caplog.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"[1, 2]\n[{VOCAB_SIZE}]\n", f"token {VOCAB_SIZE} is not in the model's vocabulary"),
        ("", "empty: nothing to warm a cache with"),
        (None, "cannot read the texts: No such file or directory"),
    ],
)
def test_a_fault_is_said_in_one_line(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "ids.jsonl"
    if content is not None:
        path.write_text(content)
    cache = cache_of()
    state = finished(warm_up_of(path, cache))
    assert said in state["error"]
    assert "\n" not in state["error"]
    assert held(cache) == 0


@pytest.mark.parametrize(
    ("save", "said"),
    [
        (without_tokenizer, "there is no tokenizer in several lines"),
        (PreTrainedTokenizerBase().save_vocabulary, "NotImplementedError()"),
    ],
)
def test_a_server_without_a_tokenizer_says_so_and_goes_on(
    tmp_path: Path, save: Callable[[Path], int | None], said: str
) -> None:
    path = token_lines(tmp_path / "ids.jsonl", 1)
    state = finished(warm_up_of(path, cache_of(), save=save))
    assert state["error"] == said


def test_a_server_without_room_for_temporary_files_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = token_lines(tmp_path / "ids.jsonl", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert "No such file or directory" in finished(warm_up_of(path, cache_of()))["error"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_piece_for_which_there_is_no_memory_ends_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = 0

    def read_one(pipe: BinaryIO) -> TextPiece | None:
        nonlocal num_read
        num_read += 1
        if num_read > 1:
            raise MemoryError
        return read_piece(pipe)

    monkeypatch.setattr(warm_up_module, "read_piece", read_one)
    cache = cache_of()
    state = finished(warm_up_of(token_lines(tmp_path / "ids.jsonl", 3000), cache))
    assert state["error"] == "the texts cannot be received: the server's log has the exception"
    assert held(cache) == state["num_tokens"] == 5_000


def test_a_reading_process_that_is_killed_is_told(tmp_path: Path) -> None:
    # More than the queue and the pipe hold, so that the process waits.
    cache = cache_of()
    warm_up = warm_up_of(token_lines(tmp_path / "ids.jsonl", 3000), cache)
    while not warm_up.describe()["num_tokens"]:
        warm_up.go_on(is_idle=False)
        time.sleep(0.001)
    assert warm_up._reader is not None
    assert warm_up._reader._process is not None
    os.kill(warm_up._reader._process.pid, signal.SIGKILL)
    state = finished(warm_up)
    assert state["error"] == "the process that reads texts ended with code -9"
    assert 0 < held(cache) == state["num_tokens"] < 3_000_000


def _start_and_wait(folder: str) -> None:
    warm_up = warm_up_of(Path(folder) / "ids.jsonl", cache_of())
    assert warm_up._reader is not None
    assert warm_up._reader._process is not None
    while not warm_up.describe()["num_tokens"]:  # the process has begun
        warm_up.go_on(is_idle=False)
    print(warm_up._reader._process.pid, warm_up._reader._folder.name, flush=True)
    sys.stdin.read()


def test_a_server_that_is_killed_ends_the_reading_process(tmp_path: Path) -> None:
    token_lines(tmp_path / "ids.jsonl", 3000)
    command = [sys.executable, "-m", "tests.plugin.warming.test_warm_up", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid, folder = server.stdout.readline().decode().split()
        assert Path(folder).exists()
        server.kill()
    deadline = time.monotonic() + HANGS_AFTER_S
    while Path(folder).exists() or Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "the process goes on"
        time.sleep(0.01)


def test_a_piece_passes_a_pipe_whole_or_not_at_all(tmp_path: Path) -> None:
    path = token_lines(tmp_path / "ids.jsonl", 9)
    pieces = list(pieces_of(path, tmp_path / "none", None))
    pipe = BytesIO()
    for piece in pieces:
        write_piece(pipe, piece)
    content = pipe.getvalue()
    read = BytesIO(content)
    for piece in pieces:
        back = read_piece(read)
        assert back is not None
        assert (back.num_files, back.num_files_read) == (piece.num_files, piece.num_files_read)
        assert np.array_equal(back.lengths, piece.lengths)
        assert np.array_equal(back.token_ids, piece.token_ids)
    assert read_piece(read) is None
    for cut in (3, 17, 200, 20_000):
        assert read_piece(BytesIO(content[:cut])) is None


def _warm_as_rank(folder: Path, rank: int, ranks: RankGroup) -> object:
    cache = SuffixCache(shared_cache_tokens=2**28, deterministic=True)
    warm_up = warm_up_of(
        folder / "texts",
        cache,
        # The other rank reads nothing.
        save=save_tokenizer if rank == 0 else without_tokenizer,
        ranks=ranks,
    )
    # Equal steps see equal caches.
    sizes = []
    while not warm_up.describe()["is_done"]:
        for is_idle in (False, False, True):
            warm_up.go_on(is_idle=is_idle)
            sizes.append(held(cache))
    state = {**warm_up.describe(), "seconds": None}
    return [sizes, state]


def test_ranks_warm_alike(tmp_path: Path, nursery: Nursery) -> None:
    (tmp_path / "texts").mkdir()
    token_lines(tmp_path / "texts" / "1.jsonl", 300)
    (tmp_path / "texts" / "2.jsonl").write_text("[-1]\n")
    first, second = found_by_ranks("tests.plugin.warming.test_warm_up", tmp_path, nursery)
    assert first == second
    assert first[0][-1] == first[1]["num_tokens"] == 300_000
    assert "token ids are not negative" in first[1]["error"]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _start_and_wait(sys.argv[1])
    else:
        run_as_rank(_warm_as_rank)
