"""How long snapshots take, and what a warm-up costs the requests that run meanwhile.

python -m benchmarks.warm_start [--tokens N] [--url URL [--admin-api-key KEY]] [--json FILE]

Without --url it measures the suffix cache alone: 64 requests propose while texts enter.
With --url it measures the time between tokens of 16 streams of a running server. Phases with and
without a warm-up alternate.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import parser_of, run, write_rows
from benchmarks.serving.client import Answer, play
from benchmarks.suffix_cache.contestants import Ours
from benchmarks.suffix_cache.timings import Batch, text
from sglang_hvd.commands.arguments import add_json, count
from sglang_hvd.commands.running_server import order_cache
from sglang_hvd.replay.training.tables import markdown_table
from sglang_hvd.suffix_cache import SharedOutputs, SuffixCache
from sglang_hvd.suffix_cache.orders import AddOutputs
from sglang_hvd.suffix_cache.snapshot import read_snapshot, write_snapshot

_FINGERPRINT = "0" * 16
_TEXT_TOKENS, _ORDER_TOKENS = 512, 16 * 1024
_NUM_PHASES = 6
_STEPS_PER_ORDER = 2  # a server reads one order between two steps at most
_STREAMS, _STREAM_TOKENS = 16, 256


def main() -> None:
    parser = parser_of("warm_start", "Time snapshots, and requests during a warm-up.")
    parser.add_argument(
        "--tokens",
        type=count,
        default=1_000_000,
        metavar="N",
        help="tokens of a snapshot, and of each warm-up (default: %(default)s)",
    )
    parser.add_argument("--url", help="a server that runs HVD and no other requests")
    parser.add_argument("--admin-api-key", metavar="KEY", help="the server's admin key")
    add_json(parser)
    options = parser.parse_args()
    if options.url is None:
        rows = [*_snapshot_rows(options.tokens), *_step_rows(options.tokens)]
    else:
        rows = _stream_rows(options.url, options.admin_api_key)
    print(markdown_table({name: name for name in rows[0]}, rows, num_labels=2))
    write_rows(options.json, rows)


def _snapshot_rows(num_tokens: int) -> list[dict[str, Any]]:
    cache = SuffixCache(shared_cache_tokens=2**28)
    for outputs in _texts(num_tokens):
        cache.add(outputs)
    cache.drain()
    saves, loads = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        for _ in range(5):
            begin = time.perf_counter()
            write_snapshot(path, cache.shared_outputs(), fingerprint=_FINGERPRINT)
            saves.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            loaded = SuffixCache(shared_cache_tokens=2**28)
            for outputs in read_snapshot(path, fingerprint=_FINGERPRINT):
                loaded.add(outputs)
            loaded.drain()
            loads.append(time.perf_counter() - begin)
            assert loaded.stats().num_shared_tokens == num_tokens // _TEXT_TOKENS * _TEXT_TOKENS
    return [_row(what, "snapshot", times) for what, times in (("save", saves), ("load", loads))]


def _step_rows(num_tokens: int) -> list[dict[str, Any]]:
    ours = Ours()
    batch = Batch(ours, 104_000)
    ours.cache.resize(1_000_000)  # the default of a server
    times: dict[str, list[float]] = {"quiet": [], "warm-up": []}
    for phase in range(_NUM_PHASES):
        name = ("quiet", "warm-up")[phase % 2]
        for outputs in _texts(num_tokens):
            if name == "warm-up":
                ours.cache.add(outputs)
            for _ in range(_STEPS_PER_ORDER):
                begin = time.perf_counter()
                batch.propose()
                times[name].append(time.perf_counter() - begin)
                time.sleep(0.005)  # the GPU's part of a step
        ours.drain()
    return [_row("proposals of 64 requests", name, found) for name, found in times.items()]


def _stream_rows(url: str, admin_api_key: str | None) -> list[dict[str, Any]]:
    gaps: dict[str, list[float]] = {"quiet": [], "warm-up": []}
    num_tokens = 0
    for phase in range(_NUM_PHASES):
        name = ("quiet", "warm-up")[phase % 2]
        is_done = threading.Event()

        def warm(is_done: threading.Event = is_done, seed: int = phase) -> None:
            nonlocal num_tokens
            while not is_done.is_set():
                for outputs in _texts(_ORDER_TOKENS, seed=seed, max_token=500):
                    order_cache(
                        url, AddOutputs.of(outputs, tokenizer=""), admin_api_key=admin_api_key
                    )
                    num_tokens += len(outputs.token_ids)

        thread = threading.Thread(target=warm)
        if name == "warm-up":
            thread.start()
        played = play(url, [_stream(i) for i in range(_STREAMS)], concurrency=_STREAMS)
        is_done.set()
        if name == "warm-up":
            thread.join()
        gaps[name] += [gap for answer in played.answers for gap in answer.gaps]
    rows = [_row("between tokens", name, found) for name, found in gaps.items()]
    return [{**row, "warm tokens": num_tokens} for row in rows]


def _stream(seed: int) -> Any:
    """One reply to a prompt of its own."""
    prompt = np.random.default_rng(seed).integers(10, 500, 64).tolist()
    params = {"temperature": 0, "max_new_tokens": _STREAM_TOKENS, "ignore_eos": True}

    def next_request(answers: Sequence[Answer]) -> dict[str, Any] | None:
        return None if answers else {"input_ids": prompt, "sampling_params": params}

    return next_request


def _texts(num_tokens: int, *, seed: int = 7, max_token: int = 2**30) -> Iterator[SharedOutputs]:
    """Texts, in orders as the command warm sends them."""
    tokens = np.minimum(text(num_tokens, seed), max_token)
    texts = tokens[: num_tokens // _TEXT_TOKENS * _TEXT_TOKENS].reshape(-1, _TEXT_TOKENS)
    step = _ORDER_TOKENS // _TEXT_TOKENS
    for start in range(0, len(texts), step):
        yield SharedOutputs.of_texts(list(texts[start : start + step]))


def _row(what: str, phase: str, seconds: Sequence[float]) -> dict[str, Any]:
    in_ms = np.array(seconds) * 1e3
    return {
        "what": what,
        "phase": phase,
        "median ms": round(statistics.median(in_ms.tolist()), 3),
        "p99 ms": round(float(np.percentile(in_ms, 99)), 3),
        "max ms": round(float(in_ms.max()), 3),
    }


if __name__ == "__main__":
    run(main)
