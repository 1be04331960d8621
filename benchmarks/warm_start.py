"""How long snapshots take, and what a warm-up costs the requests that run meanwhile.

    python -m benchmarks.warm_start [--tokens N] [--json FILE]
    python -m benchmarks.warm_start --serve [--tokens N] [--rounds N] [--plays N]
    python -m benchmarks.warm_start --url URL [--admin-api-key KEY] [--json FILE]

Without --serve and --url it measures the suffix cache alone: 64 requests propose while texts enter.

--serve measures the time between tokens of 16 streams of a server on the demo models, which
--hvd-warm-from warms. In every other play the process that reads the texts is stopped, so that
other load on the machine affects both kinds alike. Each round is a server of its own.

--url does so on a running server, to which it sends texts. Phases with and without them alternate.
"""

import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.command import parser_of, run, write_rows
from benchmarks.serving.client import Answer, play
from benchmarks.suffix_cache.contestants import Ours
from benchmarks.suffix_cache.timings import Batch, text
from sglang_hvd.commands.arguments import add_json, count
from sglang_hvd.commands.running_server import order_cache
from sglang_hvd.demo.models import demo_models
from sglang_hvd.demo.modes import server_flags
from sglang_hvd.demo.server import CPU_FLAGS, SglangServer, demo_environment
from sglang_hvd.replay.training.tables import markdown_table
from sglang_hvd.suffix_cache import SharedOutputs, SuffixCache
from sglang_hvd.suffix_cache.orders import AddOutputs
from sglang_hvd.suffix_cache.snapshot import read_snapshot, write_snapshot

_FINGERPRINT = "0" * 16
_TEXT_TOKENS, _ORDER_TOKENS = 512, 16 * 1024
_NUM_PHASES = 6
_STEPS_PER_ORDER = 2  # a server reads one order between two steps at most
_STREAMS, _STREAM_TOKENS = 16, 256
_MAX_TOKEN = 500  # every model knows it


def main() -> None:
    parser = parser_of("warm_start", "Time snapshots, and requests during a warm-up.")
    parser.add_argument(
        "--tokens",
        type=count,
        default=1_000_000,
        metavar="N",
        help="tokens of a snapshot, and of each warm-up (default: %(default)s)",
    )
    parser.add_argument("--serve", action="store_true", help="start servers of the demo models")
    parser.add_argument(
        "--rounds", type=count, default=3, help="servers of --serve (default: %(default)s)"
    )
    parser.add_argument(
        "--plays",
        type=count,
        default=100,
        help="plays of each kind with a server of --serve; fewer if the warm-up ends "
        "(default: %(default)s)",
    )
    parser.add_argument("--url", help="a server that runs HVD and no other requests")
    parser.add_argument("--admin-api-key", metavar="KEY", help="the server's admin key")
    add_json(parser)
    options = parser.parse_args()
    if options.serve and options.url is not None:
        parser.error("--serve starts servers, --url names a running one: give one of them")
    if options.serve:
        rows = _served_rows(options.tokens, options.rounds, options.plays)
    elif options.url is None:
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


def _served_rows(num_tokens: int, rounds: int, max_plays: int) -> list[dict[str, Any]]:
    flags = [*CPU_FLAGS, *server_flags("allocate", demo_models())]
    plays: dict[str, list[list[float]]] = {"quiet": [], "warm-up": []}
    progress: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "ids.jsonl").open("w") as file:
            for outputs in _texts(num_tokens, max_token=_MAX_TOKEN):
                for token_ids in outputs.token_ids.reshape(-1, _TEXT_TOKENS):
                    file.write(json.dumps(token_ids.tolist()) + "\n")
        for _ in range(rounds):
            server = SglangServer(
                [*flags, "--hvd-warm-from", str(folder / "ids.jsonl")],
                log_file=folder / "server.log",
                environment=demo_environment(),
            )
            with server:
                started = psutil.Process().children(recursive=True)
                readers = [p for p in started if "text_pipe" in " ".join(p.cmdline())]
                for _ in range(max_plays if readers else 0):
                    readers[0].suspend()
                    _wait_until_quiet(server.url)
                    quiet = _gaps_of_streams(server.url)
                    readers[0].resume()
                    during = _gaps_of_streams(server.url)
                    if _warm_up_of(server.url)["is_done"]:
                        break  # these gaps are quiet in part
                    plays["quiet"].append(quiet)
                    plays["warm-up"].append(during)
                progress.append(_warm_up_of(server.url))
    if not plays["quiet"]:
        raise ValueError("the warm-up ended before its first streams did: give more --tokens")
    rows = []
    for phase, of_phase in plays.items():
        ends = [float(np.percentile(gaps, 99)) * 1e3 for gaps in of_phase]
        row = _row("between tokens", phase, [gap for gaps in of_phase for gap in gaps])
        row |= {"plays": len(of_phase), "p99 of a play, median": statistics.median(ends)}
        row |= {"lowest": min(ends), "highest": max(ends)}
        row["warm tokens"] = sum(of_server["num_tokens"] for of_server in progress)
        rows.append(row)
    return rows


def _wait_until_quiet(url: str) -> None:
    """Waits until all texts that were read have entered the cache and are indexed."""
    before = None
    while before != (now := _warm_up_of(url)["num_tokens"]):
        before = now
        time.sleep(0.5)


def _warm_up_of(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as response:
        return dict(json.load(response)["internal_states"][0]["hvd"]["warm_up"])


def _gaps_of_streams(url: str) -> list[float]:
    played = play(url, [_stream(i) for i in range(_STREAMS)], concurrency=_STREAMS)
    return [gap for answer in played.answers for gap in answer.gaps]


def _stream_rows(url: str, admin_api_key: str | None) -> list[dict[str, Any]]:
    gaps: dict[str, list[float]] = {"quiet": [], "warm-up": []}
    num_tokens = 0
    for phase in range(_NUM_PHASES):
        name = ("quiet", "warm-up")[phase % 2]
        is_done = threading.Event()

        def warm(is_done: threading.Event = is_done, seed: int = phase) -> None:
            nonlocal num_tokens
            while not is_done.is_set():
                for outputs in _texts(_ORDER_TOKENS, seed=seed, max_token=_MAX_TOKEN):
                    order_cache(
                        url, AddOutputs.of(outputs, tokenizer=""), admin_api_key=admin_api_key
                    )
                    num_tokens += len(outputs.token_ids)

        thread = threading.Thread(target=warm)
        if name == "warm-up":
            thread.start()
        gaps[name] += _gaps_of_streams(url)
        is_done.set()
        if name == "warm-up":
            thread.join()
    rows = [_row("between tokens", name, found) for name, found in gaps.items()]
    return [{**row, "warm tokens": num_tokens} for row in rows]


def _stream(seed: int) -> Any:
    """One reply to a prompt of its own."""
    prompt = np.random.default_rng(seed).integers(10, _MAX_TOKEN, 64).tolist()
    params = {
        **{"temperature": 0, "max_new_tokens": _STREAM_TOKENS, "ignore_eos": True},
        # Otherwise later streams would draft what earlier ones were answered.
        "custom_params": {"hvd": {"learn": False}},
    }

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
