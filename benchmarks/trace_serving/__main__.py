"""Serves recorded generations with a real server for each mode, and compares the modes.

    python -m benchmarks.trace_serving --traces DIR --tokenizer FILE [--concurrency 1,16,64]
        [--modes plain,eagle3,...] [--shape tiny|llama-3.1-8b|qwen3-8b] [--json FILE] [-- FLAGS]

The models have random weights. The recording dictates the target's next token, and the number of
right tokens in the model drafter's tree is drawn (sglang_hvd/replay/core/model_drafter.py). So rows
with a model drafter are marked as simulated. Everything else is real: scheduling, prefill, both
models' forward passes, the suffix cache, the predictor and the policy. The texts and their
concurrency are real too.

The requests of a session follow each other, with the recorded prompts. Sessions that the shipped
predictor was trained on are left out. If a recording has fewer sessions than are served at a time,
it is served several times at once, each time in a cache namespace of its own.

FLAGS are passed to every server. `identical` means that every reply equals the recording.
"""

import argparse
import contextlib
import itertools
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from benchmarks.command import counts, parser_of, run, write_rows
from benchmarks.gpu import check_gpu
from benchmarks.serving.client import Answer, Conversation, play
from benchmarks.serving.measure import Cell, Row, measure, table_of
from benchmarks.trace_serving.gpu_use import GpuUse, profiled
from benchmarks.trace_serving.models import SHAPES, OwnVocabulary, write_models
from benchmarks.trace_serving.script import Script, rid_of
from sglang_hvd.allocation import max_tree_nodes, model_tree_sizes
from sglang_hvd.commands.arguments import add_json, add_texts, count, share
from sglang_hvd.config import HvdConfig
from sglang_hvd.demo.models import DemoModels
from sglang_hvd.demo.modes import MODES, server_flags
from sglang_hvd.demo.server import (
    Launch,
    SglangServer,
    demo_environment,
    flush_cache,
    grace_of,
)
from sglang_hvd.payoff import DEFAULT_PREDICTORS, AcceptancePredictor
from sglang_hvd.replay.core.model_drafter import ODDS_RATIOS, STRENGTHS, ModelDrafter
from sglang_hvd.replay.core.recordings import TraceTokenizer, find_recordings, session_fingerprints
from sglang_hvd.traces.trace import Trace

# Modes without a model drafter.
_NOT_SIMULATED = ("plain", "ngram", "cache", "suffix")


@dataclass(frozen=True, slots=True)
class TraceRow(Row):
    """simulated: the model drafter's acceptance is drawn.
    gpu: GPU use of a decode step; None if it was not profiled.
    """

    simulated: bool
    gpu: GpuUse | None = None


@dataclass(frozen=True, slots=True)
class Playlist:
    """A recording's sessions. Each lists its turns, as indices into the list of all texts."""

    name: str
    family: str
    sessions: Sequence[Sequence[int]]


def main(arguments: Sequence[str] | None = None, *, launch: Launch | None = None) -> int:
    """launch: starts the servers; None: they are child processes."""
    options = options_of(arguments)
    if options.device == "cuda":
        check_gpu()
    rows: list[TraceRow] = []
    for _, of_cell in serve_traces(options, launch=launch):
        rows += of_cell
        write_rows(options.json, map(asdict, rows))  # the rows so far
    print(table_of(rows))
    return 0 if all(row.outputs_identical for row in rows) else 1


def serve_traces(
    options: argparse.Namespace,
    *,
    without: Collection[tuple[str, int]] = (),
    launch: Launch | None = None,
) -> Iterator[tuple[Cell, list[TraceRow]]]:
    """Yields each cell with its rows, as soon as they are measured.

    without: names of recordings, with concurrencies, to leave out.
    launch: see main.
    """
    tokenizer = TraceTokenizer(options.tokenizer, options.eos_token)
    texts, played, own = _texts(tokenizer, options)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        script = folder / "script.npz"
        _script(texts, played, options).save(script)
        models = _models(own, tokenizer, folder, options)
        cells = [
            _cell(recording, texts, concurrency, options)
            for recording in played
            for concurrency in options.concurrency
            if (recording.name, concurrency) not in without
        ]
        if not cells:
            return
        urls = stack.enter_context(_servers(models, script, folder, options, launch))
        if options.warm_up == "kernels":
            _compile_kernels(urls, cells)
        for number, cell in enumerate(tqdm(cells, unit="cell", disable=None)):
            rows = measure(
                urls,
                [cell],
                rounds=options.rounds,
                warm_up=options.warm_up == "round",
                first_turn=number,
            )
            used: dict[str, GpuUse] = {}
            if options.profile_steps and cell.workload == cells[-1].workload:
                used = _gpu_use(urls, cell, folder / f"profiles-{number}", options)
            yield (
                cell,
                [
                    TraceRow(
                        **asdict(row),
                        simulated=row.mode not in _NOT_SIMULATED,
                        gpu=used.get(row.mode),
                    )
                    for row in rows
                ],
            )


def _compile_kernels(urls: Mapping[str, str], cells: Sequence[Cell]) -> None:
    """Serves once at each cell's concurrency, so that kernels for its batch sizes are compiled."""
    for cell in {cell.concurrency: cell for cell in cells}.values():
        for url in urls.values():
            play(url, cell.conversations[: cell.concurrency], concurrency=cell.concurrency)


def _gpu_use(
    urls: Mapping[str, str], cell: Cell, folder: Path, options: argparse.Namespace
) -> dict[str, GpuUse]:
    """GPU use of each mode, while it generates one reply for each concurrent request."""
    bodies = [body for talk in cell.conversations[: cell.concurrency] if (body := talk([]))]
    used = {}
    for mode, url in urls.items():
        of_mode = folder / mode
        of_mode.mkdir(parents=True)
        flush_cache(url)
        try:
            used[mode] = profiled(url, bodies, of_mode, steps=options.profile_steps)
        except (RuntimeError, ValueError, aiohttp.ClientError) as error:
            # A failed profile does not discard the measured rows.
            print(f"{mode}: {error}", file=sys.stderr)
    return used


def _texts(
    tokenizer: TraceTokenizer, options: argparse.Namespace
) -> tuple[list[Trace], list[Playlist], OwnVocabulary]:
    """The texts to play, renumbered to their own vocabulary; their recordings; the vocabulary."""
    trained_on = AcceptancePredictor.load(DEFAULT_PREDICTORS["votes"]).trained_sessions
    texts: list[Trace] = []
    played = []
    recordings = find_recordings(options.traces)
    names = [recording.name for recording in recordings]
    unknown = [name for name in options.files or () if name not in names]
    if unknown:
        raise ValueError(f"--files: {', '.join(unknown)}: unknown, choose from {', '.join(names)}")
    for recording in recordings:
        if options.files and recording.name not in options.files:
            continue
        traces = recording.traces(tokenizer)
        fingerprints = session_fingerprints(traces)
        sessions: dict[str, list[int]] = {}
        for trace in traces:
            of_session = sessions.setdefault(trace.session, [])
            if not of_session:
                trace = _cut(trace, options.context_length)
            fits = len(trace.text_ids) <= options.context_length
            is_next = not of_session or trace.turn == texts[of_session[-1]].turn + 1
            is_wanted = fits and is_next and len(of_session) < options.turns
            if (
                is_wanted
                and fingerprints[trace.session] not in trained_on
                and len(trace.output_ids) > 1
            ):
                of_session.append(len(texts))
                texts.append(trace)
        kept = [of_session for of_session in sessions.values() if of_session]
        if not kept:
            print(f"{recording.name}: left out, because no session fits", file=sys.stderr)
            continue
        played.append(Playlist(recording.name, traces[0].family, kept))
    if not played:
        raise ValueError(
            f"{options.traces}: no session can be played: give other traces, or raise "
            "--context-length"
        )
    own = OwnVocabulary.of(texts)
    return own.renumbered(texts), played, own


def _cut(trace: Trace, context_length: int) -> Trace:
    """The trace, with the beginning of its prompt cut off if text and output are too long."""
    too_many = max(len(trace.text_ids) - context_length, 0)
    return replace(trace, prompt_ids=trace.prompt_ids[min(too_many, len(trace.prompt_ids) - 1) :])


def _script(
    texts: Sequence[Trace], played: Sequence[Playlist], options: argparse.Namespace
) -> Script:
    drafter = ModelDrafter(STRENGTHS[options.strength], ODDS_RATIOS[options.kind])
    sizes = model_tree_sizes(options.tree[2] - 1)
    # Keyed by text, because sessions are in another order than texts.
    accepted: dict[int, dict[int, Any]] = {size: {} for size in sizes}
    for recording in played:
        places = list(itertools.chain(*recording.sessions))
        of_recording = [texts[place] for place in places]
        drawn = drafter.accepted_by_size(of_recording, HvdConfig(), sizes)
        for size in sizes:
            accepted[size].update(zip(places, drawn[size], strict=True))
    return Script.of(
        texts,
        {
            size: [of_size[place] for place in range(len(texts))]
            for size, of_size in accepted.items()
        },
    )


def _models(
    own: OwnVocabulary, tokenizer: TraceTokenizer, folder: Path, options: argparse.Namespace
) -> DemoModels:
    target, drafter = write_models(
        options.shape,
        folder,
        num_tokens=len(own.token_ids),
        # A verification needs room after the text.
        context_length=options.context_length + 256,
    )
    own.write_tokenizer(tokenizer.loaded, target)
    return DemoModels(target, drafter, DEFAULT_PREDICTORS["votes"])


@contextlib.contextmanager
def _servers(
    models: DemoModels,
    script: Path,
    folder: Path,
    options: argparse.Namespace,
    launch: Launch | None,
) -> Iterator[dict[str, str]]:
    steps, topk, num_nodes = map(str, options.tree)
    tree = (
        *("--speculative-num-steps", steps, "--speculative-eagle-topk", topk),
        *("--speculative-num-draft-tokens", num_nodes),
    )
    common = [
        *("--script", str(script), "--load-format", "dummy"),
        *("--max-running-requests", str(max(options.concurrency))),
        # Set it, because a server that starts later would find less memory.
        *("--max-total-tokens", str(options.kv_tokens)),
    ]
    environment = {}
    if options.device == "cpu":
        common += ["--device", "cpu", "--sleep-on-idle", "--dtype", "float32"]
        environment = demo_environment()
    else:
        # A share of the free memory at the start; --max-total-tokens limits what is used.
        common += ["--mem-fraction-static", f"{options.gpu_share:.3f}"]
    common += options.flags  # if a flag is repeated, its last value counts
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        servers = {}
        for mode in options.modes:
            # The last value of a flag counts. plain and ngram have no tree, eagle3-adaptive has
            # its own.
            of_tree = tree if mode not in ("plain", "ngram", "eagle3-adaptive") else ()
            servers[mode] = SglangServer(
                [*server_flags(mode, models), *of_tree, *common],
                log_file=(options.logs or folder) / f"{mode}.log",
                environment=environment,
                module="benchmarks.trace_serving.server",
                timeout_s=600,
                grace_s=grace_of(options.device),
                launch=launch,
            )
            stack.callback(servers[mode].stop)
        for mode in servers:
            if mode != "allocate":
                servers[mode].begin()
        # It times its steps before it serves, so it must start while the others are idle.
        for mode in sorted(servers, key=lambda mode: mode == "allocate"):
            stack.enter_context(servers[mode])
        yield {mode: server.url for mode, server in servers.items()}


def _cell(
    recording: Playlist, texts: Sequence[Trace], concurrency: int, options: argparse.Namespace
) -> Cell:
    num_sessions = max(options.sessions_per_place * concurrency, options.sessions)
    max_tokens = options.max_tokens
    repeated = itertools.islice(itertools.cycle(enumerate(recording.sessions)), num_sessions)
    conversations, wanted = [], []
    for number, (_, session) in enumerate(repeated):
        salt = str(number // len(recording.sessions))
        conversations.append(_conversation(texts, session, salt, max_tokens))
        wanted.append([texts[text].output_ids[:max_tokens].tolist() for text in session])

    def is_expected(answer: Answer) -> bool:
        return bool(wanted[answer.conversation][answer.turn] == list(answer.token_ids))

    return Cell(recording.name, recording.family, concurrency, conversations, is_expected)


def _conversation(
    texts: Sequence[Trace], session: Sequence[int], salt: str, max_tokens: int
) -> Conversation:
    def next_body(answers: Sequence[Answer]) -> dict[str, Any] | None:
        if len(answers) == len(session):
            return None
        text = session[len(answers)]
        return {
            "input_ids": texts[text].prompt_ids.tolist(),
            "rid": rid_of(text, uuid.uuid4().hex),
            "cache_salt": f"{salt}/{texts[text].namespace}",
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": min(len(texts[text].output_ids), max_tokens),
                "ignore_eos": True,
            },
        }

    return next_body


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = parser_of("trace_serving", "Serve recorded generations with real servers.")
    add_texts(parser)
    parser.add_argument("--files", nargs="+", metavar="NAME", help="serve these recordings only")
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=["plain", "eagle3", "cache", "frequency", "payoff", "allocate"],
        help=f"comma-separated, some of {','.join(MODES)}",
    )
    parser.add_argument(
        "--concurrency",
        type=counts,
        default=[1, 16, 64],
        help="comma-separated numbers of requests at a time (default: 1,16,64)",
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="tiny", help="size of the models (default: %(default)s)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--strength",
        choices=STRENGTHS,
        default="usual",
        help="how many tokens of the simulated model drafter are accepted (default: %(default)s)",
    )
    kinds = [kind for kind, ratio in ODDS_RATIOS.items() if ratio is not None]
    parser.add_argument(
        "--kind",
        choices=kinds,
        default="correlated",
        help="whether the simulated model drafter is better where the cache is right (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--tree",
        type=count,
        nargs=3,
        default=[3, 4, 16],
        metavar=("STEPS", "TOPK", "NODES"),
        help="the model drafter's tree; NODES includes the root (default: 3 4 16)",
    )
    parser.add_argument(
        "--sessions-per-place",
        type=count,
        default=2,
        help="sessions for each concurrent request; with 1, slots stay empty at the end "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--sessions", type=count, default=8, help="minimum of sessions (default: %(default)s)"
    )
    parser.add_argument(
        "--turns",
        type=count,
        default=2,
        help="maximum of turns of each session (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=count, default=64, help="of each reply (default: %(default)s)"
    )
    parser.add_argument(
        "--context-length",
        type=count,
        default=4096,
        help="in tokens; a longer first turn loses the beginning of its prompt, and a session ends "
        "before a longer later turn (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-tokens",
        type=count,
        help="maximum of tokens in each server's KV cache (default: 400000 on a CPU, 100000 on a "
        "GPU)",
    )
    parser.add_argument(
        "--gpu-share",
        type=share,
        default=0.9,
        help="share of the free GPU memory for a server's weights and KV cache (default: "
        "%(default)s)",
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the servers' logs here")
    parser.add_argument(
        "--rounds", type=count, default=1, help="measured rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--warm-up",
        choices=["none", "kernels", "round"],
        help="what runs first and is not counted: nothing, some sessions at each concurrency, or a "
        "round of each cell (default: none on a CPU, kernels on a GPU)",
    )
    parser.add_argument(
        "--profile-steps",
        type=count,
        metavar="STEPS",
        help="on a GPU, profile so many decode steps of each server in an extra run of the last "
        "recording, to see how long the GPU works",
    )
    add_json(parser)
    parser.add_argument("flags", nargs="*", help="flags of SGLang, after --")
    options = parser.parse_args(arguments)
    is_cpu = options.device == "cpu"
    if options.kv_tokens is None:
        options.kv_tokens = 400_000 if is_cpu else 100_000
    if options.warm_up is None:
        options.warm_up = "none" if is_cpu else "kernels"
    unknown = sorted(set(options.modes) - set(MODES))
    if options.profile_steps is not None and is_cpu:
        parser.error("--profile-steps needs a GPU: give --device cuda, or leave it out")
    if options.max_tokens < 2:
        parser.error("--max-tokens: prefill generates the first token of a reply: give 2 or more")
    steps, topk, num_nodes = options.tree
    max_nodes = 1 + max_tree_nodes(topk, steps)
    if not 2 <= num_nodes <= max_nodes:
        parser.error(
            f"--tree: {steps} steps with topk {topk} have 2 to {max_nodes} nodes, got {num_nodes}"
        )
    if unknown:
        parser.error(f"--modes: {', '.join(unknown)}: unknown, choose from {', '.join(MODES)}")
    return options


if __name__ == "__main__":
    run(main)
