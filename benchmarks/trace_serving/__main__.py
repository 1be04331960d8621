"""Recorded generations through the real server, every mode side by side.

    python -m benchmarks.trace_serving --traces DIR --tokenizer FILE [--concurrency 1,16,64]
        [--modes plain,eagle3,...] [--shape tiny|llama-3.1-8b|qwen3-8b] [--json FILE] [-- FLAGS]

The models have random weights. The target's next token is dictated by the recording, and of the
model drafter's tree as many tokens are right as are drawn (sglang_hvd/replay/model_drafter.py),
so its rows are marked simulated. Scheduling, prefill, both models' forwards, the suffix cache, the
predictor and the policy are the real ones and see real text at real concurrency; requests of a
session follow each other with the recorded prompts. Sessions that the shipped predictor was trained
on are left out. A recording with fewer sessions than are served at a time is served several times
at once, each time in a cache namespace of its own.

FLAGS go to every server. `identical` says that every reply is what was recorded.
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
from sglang_hvd.allocation import model_tree_sizes, most_tree_nodes
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
from sglang_hvd.replay.model_drafter import ODDS_RATIOS, STRENGTHS, ModelDrafter
from sglang_hvd.replay.recordings import find_recordings, session_fingerprints
from sglang_hvd.replay.trace_tokenizer import TraceTokenizer
from sglang_hvd.traces.trace import Trace

# These run no model drafter.
_NOT_SIMULATED = ("plain", "ngram", "cache")


@dataclass(frozen=True, slots=True)
class TraceRow(Row):
    """simulated: the model drafter's acceptance is drawn.
    gpu: of a decode step, where it was profiled."""

    simulated: bool
    gpu: GpuUse | None = None


@dataclass(frozen=True, slots=True)
class Playlist:
    """A recording's sessions: places in the list of all texts, turn by turn."""

    name: str
    family: str
    sessions: Sequence[Sequence[int]]


def main(arguments: Sequence[str] | None = None, *, launch: Launch | None = None) -> int:
    """launch: starts the servers otherwise than as children of this process."""
    options = options_of(arguments)
    if options.device == "cuda":
        check_gpu()
    rows: list[TraceRow] = []
    for _, of_cell in serve_traces(options, launch=launch):
        rows += of_cell
        write_rows(options.json, map(asdict, rows))  # what there is, so far
    print(table_of(rows))
    return 0 if all(row.outputs_identical for row in rows) else 1


def serve_traces(
    options: argparse.Namespace,
    *,
    without: Collection[tuple[str, int]] = (),
    launch: Launch | None = None,
) -> Iterator[tuple[Cell, list[TraceRow]]]:
    """Each cell and its rows, as they are measured.

    without: recordings and numbers at once that are left out.
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
    """Serves as many sessions at once as each cell does, once: what is compiled for a batch size
    is compiled now."""
    for cell in {cell.concurrency: cell for cell in cells}.values():
        for url in urls.values():
            play(url, cell.conversations[: cell.concurrency], concurrency=cell.concurrency)


def _gpu_use(
    urls: Mapping[str, str], cell: Cell, folder: Path, options: argparse.Namespace
) -> dict[str, GpuUse]:
    """Of each mode, while as many replies as are served at once are generated."""
    bodies = [body for talk in cell.conversations[: cell.concurrency] if (body := talk([]))]
    used = {}
    for mode, url in urls.items():
        of_mode = folder / mode
        of_mode.mkdir(parents=True)
        flush_cache(url)
        try:
            used[mode] = profiled(url, bodies, of_mode, steps=options.profile_steps)
        except (RuntimeError, ValueError, aiohttp.ClientError) as error:
            # What was measured stays.
            print(f"{mode}: {error}", file=sys.stderr)
    return used


def _texts(
    tokenizer: TraceTokenizer, options: argparse.Namespace
) -> tuple[list[Trace], list[Playlist], OwnVocabulary]:
    """The texts that are played, by recording, in their own vocabulary."""
    trained_on = AcceptancePredictor.load(DEFAULT_PREDICTORS["votes"]).trained_sessions
    texts: list[Trace] = []
    played = []
    recordings = find_recordings(options.traces)
    names = [recording.name for recording in recordings]
    unknown = [name for name in options.files or () if name not in names]
    if unknown:
        raise ValueError(f"--files: {', '.join(unknown)}: known are {', '.join(names)}")
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
            print(f"{recording.name}: no session fits, left out", file=sys.stderr)
            continue
        played.append(Playlist(recording.name, traces[0].family, kept))
    if not played:
        raise ValueError(f"{options.traces}: nothing to play")
    own = OwnVocabulary.of(texts)
    return own.renumbered(texts), played, own


def _cut(trace: Trace, context_length: int) -> Trace:
    """A prompt that is too long, without its beginning."""
    too_many = max(len(trace.text_ids) - context_length, 0)
    return replace(trace, prompt_ids=trace.prompt_ids[min(too_many, len(trace.prompt_ids) - 1) :])


def _script(
    texts: Sequence[Trace], played: Sequence[Playlist], options: argparse.Namespace
) -> Script:
    drafter = ModelDrafter(STRENGTHS[options.strength], ODDS_RATIOS[options.kind])
    sizes = model_tree_sizes(options.tree[2] - 1)
    # By text: recordings go session by session, which is not the order of their lines.
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
        # Behind the text there has to be room for a verification.
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
        # The same for all: a server that starts behind others would find less.
        *("--max-total-tokens", str(options.kv_tokens)),
    ]
    environment = {}
    if options.device == "cpu":
        common += ["--device", "cpu", "--sleep-on-idle", "--dtype", "float32"]
        environment = demo_environment()
    else:
        # Of what is free when a server starts; it takes what --max-total-tokens asks for.
        common += ["--mem-fraction-static", f"{options.gpu_share:.3f}"]
    common += options.flags  # the last of a flag counts
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        servers = {}
        for mode in options.modes:
            # The last of a flag counts: ngram has no tree, the others take this one.
            of_tree = tree if mode not in ("plain", "ngram") else ()
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
        # That one times its steps before it serves, so it starts when the others are idle.
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
    """The command line's."""
    parser = parser_of("trace_serving", "Recorded generations through the real server.")
    add_texts(parser)
    parser.add_argument("--files", nargs="+", metavar="NAME", help="these recordings only")
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=["plain", "eagle3", "cache", "frequency", "payoff", "allocate"],
        help=f"of {','.join(MODES)}",
    )
    parser.add_argument("--concurrency", type=counts, default=[1, 16, 64])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--strength", choices=STRENGTHS, default="usual")
    kinds = [kind for kind, ratio in ODDS_RATIOS.items() if ratio is not None]
    parser.add_argument("--kind", choices=kinds, default="correlated")
    parser.add_argument(
        "--tree",
        type=count,
        nargs=3,
        default=[3, 4, 16],
        metavar=("STEPS", "TOPK", "NODES"),
        help="of the model drafter, root counted",
    )
    parser.add_argument(
        "--sessions-per-place",
        type=count,
        default=2,
        help="sessions for each that is served at a time: with one, places stay empty at the end",
    )
    parser.add_argument("--sessions", type=count, default=8, help="at least so many")
    parser.add_argument("--turns", type=count, default=2, help="of each session, at most")
    parser.add_argument("--max-tokens", type=count, default=64, help="of each reply")
    parser.add_argument(
        "--context-length",
        type=count,
        default=4096,
        help="in tokens; a longer first turn loses the beginning of its prompt, and a session ends "
        "before a later one",
    )
    parser.add_argument(
        "--kv-tokens",
        type=count,
        help="of each server's KV cache, at most (default: 400000 on a CPU, 100000 on a GPU)",
    )
    parser.add_argument(
        "--gpu-share",
        type=share,
        default=0.9,
        help="of what is free when a server starts, for its weights and KV cache",
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the servers' logs here")
    parser.add_argument("--rounds", type=count, default=1)
    parser.add_argument(
        "--warm-up",
        choices=["none", "kernels", "round"],
        help="before what counts: nothing, a few sessions for each number at once, or a round of "
        "each cell (default: none on a CPU, kernels on a GPU)",
    )
    parser.add_argument(
        "--profile-steps",
        type=count,
        metavar="STEPS",
        help="of a GPU: with the last recording, profile so many decode steps of each server in a "
        "run of their own, for what share of them it works",
    )
    add_json(parser)
    parser.add_argument("flags", nargs="*", help="of SGLang, behind --")
    options = parser.parse_args(arguments)
    is_cpu = options.device == "cpu"
    if options.kv_tokens is None:
        options.kv_tokens = 400_000 if is_cpu else 100_000
    if options.warm_up is None:
        options.warm_up = "none" if is_cpu else "kernels"
    unknown = sorted(set(options.modes) - set(MODES))
    if options.profile_steps is not None and is_cpu:
        parser.error("--profile-steps: of a GPU")
    if options.max_tokens < 2:
        parser.error("--max-tokens: the first token of a reply is none of decoding, give 2 or more")
    steps, topk, num_nodes = options.tree
    most = 1 + most_tree_nodes(topk, steps)
    if not 2 <= num_nodes <= most:
        parser.error(
            f"--tree: {steps} steps with topk {topk} have 2 to {most} nodes, got {num_nodes}"
        )
    if unknown:
        parser.error(f"--modes: {', '.join(unknown)}: known are {', '.join(MODES)}")
    return options


if __name__ == "__main__":
    run(main)
