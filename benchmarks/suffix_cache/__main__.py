"""Compares the suffix cache with ArcticInference's and SGLang's.

python -m benchmarks.suffix_cache [--json FILE]
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from benchmarks.command import parser_of, run, write_rows
from benchmarks.suffix_cache import peer, replay, timings
from benchmarks.suffix_cache.contestants import Arctic, Contestant, Ngram, Ours
from benchmarks.suffix_cache.rows import Row, higher_is_better, lower_is_better, table
from sglang_hvd.commands.arguments import add_json
from sglang_hvd.replay.core.recordings import TraceTokenizer, find_recordings, mean_over_families

_BESIDE_NGRAM = ", compared with SGLang's NGRAM"
SHAPES = {"chain": 0, "tree32": 32, "tree64": 64}


def main() -> None:
    parser = parser_of(
        "suffix_cache", "Compare the suffix cache with ArcticInference's and SGLang's."
    )
    add_json(parser)
    parser.add_argument(
        "--traces",
        type=Path,
        default=os.environ.get("HVD_TRACES"),
        help="folder of recorded generations (default: $HVD_TRACES; if neither is given, tokens "
        "per step are not measured)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=os.environ.get("HVD_TOKENIZER"),
        help="tokenizer.json of the recordings (default: $HVD_TOKENIZER)",
    )
    parser.add_argument(
        "--peer-folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / f"arctic-inference-{peer.VERSION}",
        help="folder to build ArcticInference in (default: %(default)s)",
    )
    parser.add_argument("--no-peer", action="store_true", help="measure only ours")
    parser.add_argument("--no-timings", action="store_true", help="measure only the drafts")
    options = parser.parse_args()

    arctic = ngram = None
    if not options.no_peer:
        arctic = _available(
            f"ArcticInference {peer.VERSION}", lambda: peer.load(options.peer_folder)
        )
        ngram = _available("SGLang's NGRAM corpus", peer.load_ngram)
    rows: list[Row] = []
    if not options.no_timings:
        rows += _timing_rows(arctic, options.peer_folder)
        rows += _ngram_timing_rows(ngram) if ngram else []
    if options.traces is None or options.tokenizer is None:
        print(
            "tokens per step are not measured: give --traces and --tokenizer, or set HVD_TRACES "
            "and HVD_TOKENIZER"
        )
    else:
        rows += _draft_rows(arctic, ngram, Path(options.traces), Path(options.tokenizer))
    print(table(rows))
    write_rows(options.json, map(asdict, rows))


def _available(name: str, load: Callable[[], ModuleType]) -> ModuleType | None:
    try:
        return load()
    except peer.PeerUnavailableError as reason:
        print(f"without {name}: {reason}")
        return None


def _timing_rows(arctic: ModuleType | None, peer_folder: Path) -> list[Row]:
    def of_peer(measure: Callable[[Contestant], float]) -> float | None:
        return None if arctic is None else measure(Arctic(arctic))

    rows = [
        lower_is_better(
            "append_us_per_token",
            "one request, 100k tokens",
            "us",
            timings.append_us_per_token(Ours()),
            of_peer(timings.append_us_per_token),
            "<= 0.2",
        )
    ]
    for num_warm in (104_000, 1_000_000):
        theirs = timings.Batch(Arctic(arctic), num_warm).measure(30) if arctic else (None, None)
        for shape, num_nodes in SHAPES.items():
            ours = timings.Batch(Ours(num_nodes), num_warm).measure(400)
            stream = f"{shape}, {num_warm // 1000}k warm tokens"
            limits = {"chain": ("<= 2", "<= 0.25"), "tree32": ("<= 6", "<= 0.5")}
            per_request, per_step = limits.get(shape, (None, None))
            rows += [
                lower_is_better(
                    "propose_us_per_request", stream, "us", ours[0], theirs[0], per_request
                ),
                lower_is_better("step64_ms", stream, "ms", ours[1], theirs[1], per_step),
            ]
    for stream, measure in (
        ("prompt of 128k tokens", timings.start_128k_ms),
        ("next turn of a session of 128k tokens", timings.next_turn_128k_ms),
    ):
        ours = measure(Ours)
        theirs = measure(lambda: Arctic(arctic)) if arctic else (None, None)
        on_thread = "start128k_serving_thread_ms"
        rows += [
            lower_is_better("start128k_ms", stream, "ms", ours[1], theirs[1], "<= 30"),
            lower_is_better(on_thread, stream, "ms", ours[0], theirs[0], "< 0.5"),
        ]
    ours = timings.memory(None)
    theirs = timings.memory(peer_folder) if arctic else (None, None)
    stream = "responses, 1M tokens"
    rows += [
        lower_is_better("bytes_per_token", stream, "B", ours[0], theirs[0], "<= 48"),
        lower_is_better(
            "bytes_per_token_after_evicting_half", stream, "B", ours[1], theirs[1], "<= 48"
        ),
        lower_is_better(
            "evict_8k_ms",
            "one of 64 responses",
            "ms",
            timings.evict_8k_ms(Ours()),
            of_peer(timings.evict_8k_ms),
            None,
        ),
    ]
    return rows


def _ngram_timing_rows(ngram: ModuleType) -> list[Row]:
    """Compared with SGLang's own corpus, at the size of its trees."""
    num_warm = 1_000_000
    theirs = timings.Batch(Ngram(ngram), num_warm).measure(100)
    ours = timings.Batch(Ours(Ngram.NUM_NODES), num_warm).measure(400)
    append = timings.append_us_per_token
    text = "one request, 100k tokens" + _BESIDE_NGRAM
    trees = f"tree{Ngram.NUM_NODES}, {num_warm // 1000}k warm tokens{_BESIDE_NGRAM}"
    return [
        lower_is_better(
            "append_us_per_token", text, "us", append(Ours()), append(Ngram(ngram)), None
        ),
        lower_is_better("propose_us_per_request", trees, "us", ours[0], theirs[0], None),
        lower_is_better("step64_ms", trees, "ms", ours[1], theirs[1], None),
    ]


def _draft_rows(
    arctic: ModuleType | None,
    ngram: ModuleType | None,
    traces_dir: Path,
    tokenizer_file: Path,
) -> list[Row]:
    tokenizer = TraceTokenizer(tokenizer_file, eos_token=None)
    targets = {"chain": "ratio >= 1.15", "tree32": "ratio >= 1.32", "tree64": "ratio >= 1.40"}
    rows: list[Row] = []
    found: dict[str, list[tuple[str, float]]] = {}  # family and figure of each file
    for recording in find_recordings(traces_dir):
        traces = recording.traces(tokenizer)
        figures = {
            shape: replay.tokens_per_step(Ours(num_nodes), traces)
            for shape, num_nodes in SHAPES.items()
        }
        theirs = replay.tokens_per_step(Arctic(arctic), traces) if arctic else None
        for shape, ours in figures.items():
            name = f"tokens_per_step_{shape}"
            rows.append(
                higher_is_better(name, recording.name, "tokens", ours, theirs, "ratio >= 1")
            )
        print(recording.name, {shape: round(ours, 3) for shape, ours in figures.items()}, theirs)
        if theirs is not None:
            figures["peer"] = theirs
        if ngram is not None:
            figures["small"] = replay.tokens_per_step(Ours(Ngram.NUM_NODES), traces)
            figures["ngram"] = replay.tokens_per_step(Ngram(ngram), traces)
        for contestant, figure in figures.items():
            found.setdefault(contestant, []).append((traces[0].family, figure))

    def mean(contestant: str) -> float:
        of_all = mean_over_families(found[contestant])
        assert of_all is not None, "every contestant had the same files"
        return of_all

    for shape, target in targets.items():
        theirs = mean("peer") if arctic else None
        name = f"tokens_per_step_{shape}"
        rows.append(higher_is_better(name, "mean", "tokens", mean(shape), theirs, target))
    if ngram is not None:
        name, stream = f"tokens_per_step_tree{Ngram.NUM_NODES}", "mean" + _BESIDE_NGRAM
        rows.append(higher_is_better(name, stream, "tokens", mean("small"), mean("ngram"), None))
    return rows


if __name__ == "__main__":
    run(main)
