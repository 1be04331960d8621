"""Snapshots are whole, or they are refused; what is loaded drafts as what was saved."""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_hvd.suffix_cache import SharedOutputs, SuffixCache
from sglang_hvd.suffix_cache.snapshot import check_snapshot_place, read_snapshot, write_snapshot
from sglang_hvd.suffix_cache.snapshot_saver import SnapshotSaver
from sglang_hvd.whole_file import remove_leftovers
from tests.suffix_cache.proposed_drafts import propose

FINGERPRINT = "0123456789abcdef"
TENANT = "a" * 64


def texts(num: int, *, seed: int = 0, length: int = 60) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50, length, dtype=np.int32) for _ in range(num)]


def filled(num: int = 40, **sizes: int) -> SuffixCache:
    """A cache with outputs of two namespaces in turn."""
    cache = SuffixCache(background=False, **sizes)
    for i, text in enumerate(texts(num)):
        cache.add(SharedOutputs.of_texts([text], TENANT if i % 3 == 0 else ""))
    return cache


def outputs_of(cache: SuffixCache) -> list[tuple[str, list[int], int]]:
    """Namespace, tokens and time of each output, oldest first."""
    found = []
    for piece in cache.shared_outputs():
        ends = np.cumsum(piece.lengths)
        for space, end, length, kept_at in zip(
            piece.spaces, ends, piece.lengths, piece.kept_at, strict=True
        ):
            tokens = piece.token_ids[end - length : end].tolist()
            found.append((piece.namespaces[space], tokens, int(kept_at)))
    return found


def loaded(path: Path, **sizes: int) -> SuffixCache:
    cache = SuffixCache(background=False, **sizes)
    for piece in read_snapshot(path, fingerprint=FINGERPRINT):
        cache.add(piece)
    return cache


def refused(path: Path, fingerprint: str = FINGERPRINT) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read_snapshot(path, fingerprint=fingerprint)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    write_snapshot(path, filled().shared_outputs(), fingerprint=FINGERPRINT)
    return path


def test_a_loaded_cache_holds_the_same_outputs_in_the_same_order(saved: Path) -> None:
    before, after = filled(), loaded(saved)
    assert [(name, ids) for name, ids, _ in outputs_of(after)] == [
        (name, ids) for name, ids, _ in outputs_of(before)
    ]
    after.check()
    kept_at = [at for _, _, at in outputs_of(after)]
    assert all(abs(at - time.time()) < 600 for at in kept_at)
    assert saved.stat().st_mode & 0o777 == 0o600


def test_a_loaded_cache_drafts_as_the_saved_one(saved: Path) -> None:
    for namespace in ("", TENANT):
        drafts = []
        for cache in (filled(), loaded(saved)):
            cache.start("a", texts(40)[3][10:20], namespace)
            [draft] = propose(cache, ["a"], 16)
            drafts.append(None if draft is None else draft.token_ids.tolist())
        assert drafts[0] is not None
        assert drafts[0] == drafts[1]


def test_what_a_smaller_cache_can_hold_are_the_newest_outputs(saved: Path) -> None:
    small = loaded(saved, shared_cache_tokens=600)
    assert [ids for _, ids, _ in outputs_of(small)] == [t.tolist() for t in texts(40)[-10:]]


def test_outputs_that_were_evicted_and_erased_are_not_saved(tmp_path: Path) -> None:
    cache = filled(shared_cache_tokens=600)
    cache.flush(TENANT)
    write_snapshot(tmp_path / "cache", cache.shared_outputs(), fingerprint=FINGERPRINT)
    names = {name for name, _, _ in outputs_of(loaded(tmp_path / "cache"))}
    assert names == {""}
    assert len(outputs_of(cache)) == 6


@pytest.mark.parametrize("twentieth", range(20))
def test_a_cut_snapshot_is_refused(saved: Path, twentieth: int) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: len(content) * twentieth // 20])
    assert "snapshot" in refused(saved)


def test_a_snapshot_with_a_flipped_bit_anywhere_is_refused(saved: Path) -> None:
    content = saved.read_bytes()
    for place in (*range(64), *range(64, len(content), 97), len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        saved.write_bytes(changed)
        refused(saved)


def test_a_snapshot_with_more_at_its_end_is_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"\0")
    assert "checksum" in refused(saved)


def test_a_snapshot_of_another_tokenizer_is_refused(saved: Path) -> None:
    assert f"is of tokenizer {FINGERPRINT}, the one that is served" in refused(saved, "f" * 16)


def test_a_snapshot_of_a_newer_version_is_refused(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[8:12] = struct.pack("<I", 2)
    saved.write_bytes(content)
    assert "has version 2, this sglang-hvd reads 1" in refused(saved)


def test_a_file_that_is_no_snapshot_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("something of the user's")
    assert refused(path) == f"{path} is not a snapshot of a cache"
    assert "No such file" in refused(tmp_path / "none")
    with pytest.raises(ValueError, match="there is no folder"):
        check_snapshot_place(tmp_path / "none" / "cache")
    with pytest.raises(ValueError, match="is not replaced"):
        write_snapshot(path, filled().shared_outputs(), fingerprint=FINGERPRINT)
    assert path.read_text() == "something of the user's"


@pytest.fixture
def small_files() -> Iterator[None]:
    """Writing fails beyond 4 KiB of a file, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
def test_when_the_disk_is_full_the_old_snapshot_stays_and_the_next_one_is_written(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cache"
    cache = filled(4)
    saver = SnapshotSaver(cache, FINGERPRINT, path, every_minutes=None)
    saver.ask(path)
    saved_by(saver, 1)
    cache.add(SharedOutputs.of_texts(texts(40, seed=1)))
    saver.ask(path)
    assert saved_by(saver, 2)["last_error"] == f"{path}: cannot write: File too large"
    assert len(outputs_of(loaded(path))) == 4
    cache.resize(240)
    saver.ask(path)
    assert saved_by(saver, 3)["last_error"] is None
    assert len(outputs_of(loaded(path))) == 4
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
    saver.close()


def saved_by(saver: SnapshotSaver, num: int) -> dict[str, object]:
    """Wait until so many snapshots were written or failed."""
    deadline = time.monotonic() + 60
    while (state := saver.describe())["num_done"] < num:
        assert time.monotonic() < deadline, "no snapshot"
        time.sleep(0.005)
    return state


KILLED = """
import sys
from pathlib import Path
import numpy as np
from sglang_hvd.suffix_cache import SharedOutputs
from sglang_hvd.suffix_cache.snapshot import write_snapshot

def pieces():
    for i in range(1 << 30):
        if i == 50:
            print("in the middle", flush=True)
        yield SharedOutputs.of_texts([np.arange(5000, dtype=np.int32)])

write_snapshot(Path(sys.argv[1]), pieces(), fingerprint="0123456789abcdef")
"""


def test_a_saver_that_is_killed_leaves_the_old_snapshot(saved: Path) -> None:
    content = saved.read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(saved)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in the middle\n"
    process.kill()
    process.communicate()
    assert saved.read_bytes() == content
    # The next server removes the rest.
    assert len(os.listdir(saved.parent)) == 2
    (saved.parent / ".cache.notes").mkdir()
    remove_leftovers(saved)
    assert sorted(os.listdir(saved.parent)) == [".cache.notes", "cache"]


def test_snapshots_are_written_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    cache = filled(4)
    saver = SnapshotSaver(cache, FINGERPRINT, path, every_minutes=0.05 / 60)
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    cache.add(SharedOutputs.of_texts(texts(1, seed=1)))
    saver.close()
    saver.close()
    assert len(outputs_of(loaded(path))) == 5


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_copies_made_while_outputs_come_and_go_are_whole(tmp_path: Path) -> None:
    cache = SuffixCache(shared_cache_tokens=20_000)
    all_texts = texts(4000, length=50)
    known = {tuple(text.tolist()) for text in all_texts}
    is_done = threading.Event()
    faults: list[object] = []

    def copy() -> None:
        while not is_done.is_set():
            for _, tokens, _ in outputs_of(cache):
                if tuple(tokens) not in known:
                    faults.append(tokens)

    thread = in_background(copy)
    for start in range(0, 4000, 20):
        cache.add(SharedOutputs.of_texts(all_texts[start : start + 20]))
        cache.drain()
    is_done.set()
    thread.join()
    assert not faults
    cache.check()


def test_contents_say_what_each_namespace_holds_and_how_often_it_helped() -> None:
    cache = filled(6)
    cache.start("a", texts(6)[0][:10], TENANT)
    assert propose(cache, ["a"], 8)[0] is not None
    mine, theirs = sorted(cache.contents(), key=lambda found: found.name)
    assert (mine.num_outputs, mine.num_tokens, mine.num_drafts) == (4, 240, 0)
    assert (theirs.name, theirs.num_outputs, theirs.num_drafts) == (TENANT, 2, 1)
    assert mine.num_bytes > 16_000
    cache.flush(TENANT)
    assert [found.name for found in cache.contents()] == [""]


def test_added_outputs_that_do_not_fit_are_left_out_or_refused() -> None:
    cache = SuffixCache(background=False, shared_cache_tokens=100)
    cache.add(SharedOutputs.of_texts(texts(1, length=101)))
    assert cache.contents() == []
    cache.add(SharedOutputs.of_texts([]))
    with pytest.raises(ValueError, match="negative"):
        SharedOutputs.of_texts([np.array([-1], np.int32)])
    one = np.ones(1, np.int32)
    with pytest.raises(ValueError, match="no namespace"):
        SharedOutputs([""], one, one, one.astype(np.int64), one)
    with pytest.raises(ValueError, match="add up"):
        SharedOutputs([""], 0 * one, 2 * one, one.astype(np.int64), one)


def test_an_erased_namespace_takes_no_output_that_waits() -> None:
    cache = SuffixCache()
    cache.add(SharedOutputs.of_texts(texts(2000)))
    cache.flush()
    cache.drain()
    before = len(outputs_of(cache))
    assert before == 0


def test_splitting_and_runs_keep_every_output() -> None:
    [piece] = filled().shared_outputs()
    assert [len(part.lengths) for part in piece.split(200, 30)] == [4] * 10
    parts = list(piece.split(10_000, 7))
    assert [len(part.lengths) for part in parts] == [7] * 5 + [5]
    assert np.concatenate([part.token_ids for part in parts]).tolist() == piece.token_ids.tolist()
    runs = list(piece.by_namespace())
    assert sum(len(lengths) for _, _, lengths, _ in runs) == 40
    assert [name for name, *_ in runs[:3]] == [TENANT, "", TENANT]
