"""Compares ways of decoding: throughput, latency and the source of the tokens.

    python -m benchmarks.serving --modes plain,eagle3,ngram,cache,frequency,payoff,allocate
        --concurrency 1,4,16 [--json FILE]
    python -m benchmarks.serving --attach plain=URL --attach payoff=URL [--concurrency 1,4,16] ...
    python -m benchmarks.serving ... --rates 1,2,4 --max-ttft-ms 500 --max-tpot-ms 50
    python -m benchmarks.serving ... --workloads mt-bench,delegate-52,mine.jsonl --max-tokens 8192
    python -m benchmarks.serving ... --phases chat,editing,chat

Each mode is a server of its own on the demo models, or one that is already running. All servers
stay up together and take turns, in another order each time, so that other load on the machine
affects all of them alike. Each server's caches are flushed before each measurement. The first round
is not counted. A mode whose server does not start, or ends, is marked, and the others go on.

--concurrency is a closed loop: a conversation begins when another has ended. --rates is an open
loop: conversations arrive at random, at so many per second, whether or not the server keeps up.
--phases plays workloads one after the other without a flush between them, and has figures for each.
It shows how fast a mode follows traffic that changes.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.command import counts, parser_of, rates, run, write_rows
from benchmarks.serving.client import Answer, conversation_of, play
from benchmarks.serving.measure import Bounds, Cell, measure, table_of
from benchmarks.workloads.catalogue import find
from benchmarks.workloads.prompts import Message, Prompt, draw
from sglang_hvd.commands.arguments import add_json, count, not_negative, seed
from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import demo_models
from sglang_hvd.demo.modes import COMMON_MODES, MODES, server_flags
from sglang_hvd.demo.server import CPU_FLAGS, Launch, ServerFailed, SglangServer, demo_environment

_SEED = 11


def main(arguments: Sequence[str] | None = None, *, launch: Launch | None = None) -> int:
    """launch: starts the servers; None: they are child processes."""
    options = _options(arguments)
    with contextlib.ExitStack() as stack:
        urls: dict[str, str] = dict(options.attach)
        unserved: dict[str, str] = {}
        if not urls:
            urls, unserved = stack.enter_context(_servers(options.modes, launch))
        bounds = Bounds(options.max_ttft_ms, options.max_tpot_ms)
        cells, ended = _expected_cells(urls, options)
        rows = measure(
            {mode: url for mode, url in urls.items() if mode not in ended},
            cells,
            rounds=options.rounds,
            bounds=None if bounds == Bounds() else bounds,
            seed=options.seed,
            unserved=unserved | ended,
        )
    print(table_of(rows))
    write_rows(options.json, map(asdict, rows))
    return 0 if all(row.outputs_identical and row.is_complete for row in rows) else 1


@contextlib.contextmanager
def _servers(
    modes: Sequence[str], launch: Launch | None
) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """URLs by mode, and by mode why there is no server.

    Raises ServerFailed if no server starts.
    """
    models = demo_models()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls, unserved = {}, {}
        for mode in modes:
            flags = [*CPU_FLAGS, *server_flags(mode, models)]  # type: ignore[arg-type]
            server = SglangServer(
                flags,
                log_file=folder / f"{mode}.log",
                environment=demo_environment(),
                launch=launch,
            )
            try:
                urls[mode] = stack.enter_context(server).url
            except ServerFailed as error:
                if mode == modes[-1] and not urls:
                    raise
                unserved[mode] = server.last_exception or " ".join(str(error).split())
                print(f"{mode} cannot be served here: {unserved[mode]}", file=sys.stderr)
        yield urls, unserved


class _OfServer:
    """The chat template of a server's tokenizer."""

    def __init__(self, url: str) -> None:
        """Raises ServerFailed if the server does not say which tokenizer it has."""
        try:
            with urllib.request.urlopen(f"{url}/model_info", timeout=60) as response:
                path = json.load(response)["tokenizer_path"]
        except OSError as error:
            raise ServerFailed(f"{url}: {error}") from error
        self._tokenizer = AutoTokenizer.from_pretrained(path)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        rendered = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
        return str(rendered)


def _prompts(name: str, num: int, options: argparse.Namespace) -> list[Prompt]:
    """Prompts of a family of the demo, or else measured prompts of a workload."""
    if name not in FAMILIES:
        return [*draw(find(name), folder=options.data, num_measured=num).measured]
    sessions = demo_sessions(name, count=num, seed=_SEED)
    return [Prompt.of_user(*(turn.user for turn in session.turns)) for session in sessions]


def _expected_cells(
    urls: Mapping[str, str], options: argparse.Namespace
) -> tuple[list[Cell], dict[str, str]]:
    """The cells, and by mode why its server ended before all expected answers were known.

    The expected answers are those of plain decoding, or of the first mode if no server decodes
    plainly. If that server ends, they are those of the next one. Raises ServerFailed if none is
    left.
    """
    ended: dict[str, str] = {}
    for mode in sorted(urls, key=lambda mode: mode != "plain"):
        try:
            return _cells(urls[mode], options), ended
        except ServerFailed as error:
            ended[mode] = " ".join(str(error).split())
            print(f"{mode} has ended: {ended[mode]}", file=sys.stderr)
    faults = "; ".join(f"{mode}: {fault}" for mode, fault in ended.items())
    raise ServerFailed(f"no server is left that could give the expected answers ({faults})")


def _cells(url: str, options: argparse.Namespace) -> list[Cell]:
    """The cells of all workloads, then those of the phases. url: of the server whose answers, one
    request at a time, are expected."""
    template = _OfServer(url) if options.template == "official" else None

    def request(prompt: Prompt) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": options.max_tokens}
        return {**prompt.request(template), "sampling_params": sampling}

    num = _num_sessions(max(options.concurrency, default=0), options)
    loads: list[tuple[int, float | None]] = [
        (concurrency, None) for concurrency in options.concurrency
    ]
    loads += [(num, rate) for rate in options.rates]
    cells = []
    for name in options.workloads:
        whole = _cell(url, name, _prompts(name, num, options), request)
        cells += [_under(whole, *load, options) for load in loads]
    num_of = Counter(options.phases)
    # A workload that comes back has conversations that no cache has seen.
    left = {name: _prompts(name, num * times, options) for name, times in num_of.items()}
    phases = []
    for number, name in enumerate(options.phases, start=1):
        prompts, left[name] = left[name][:num], left[name][num:]
        whole = _cell(url, name, prompts, request)
        phases.append(replace(whole, phase=number))
    return cells + [_under(whole, *load, options) for load in loads for whole in phases]


def _cell(
    url: str, name: str, prompts: Sequence[Prompt], request: Callable[[Prompt], dict[str, Any]]
) -> Cell:
    """These conversations, all at once. url: of the server whose answers are expected. request:
    what is sent for a prompt."""
    conversations = [conversation_of(prompt, request) for prompt in prompts]
    expected = {
        (answer.conversation, answer.turn): answer.token_ids
        for answer in play(url, conversations, concurrency=1).answers
    }

    def is_expected(answer: Answer) -> bool:
        return expected[answer.conversation, answer.turn] == answer.token_ids

    family = name if name in FAMILIES else find(name).family
    return Cell(name, family, len(conversations), conversations, is_expected)


def _under(whole: Cell, concurrency: int, rate: float | None, options: argparse.Namespace) -> Cell:
    """A cell under another load. A closed loop plays as many conversations as it needs."""
    talks = whole.conversations
    if rate is None:
        talks = talks[: _num_sessions(concurrency, options)]
    return replace(whole, concurrency=concurrency, conversations=talks, rate=rate)


def _num_sessions(concurrency: int, options: argparse.Namespace) -> int:
    """Enough sessions for each concurrent slot to run two: slots stay empty at the end of a run."""
    return max(int(options.sessions), 2 * concurrency)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("serving", "Compare ways of decoding.")
    parser.add_argument(
        "--modes",
        type=_modes,
        help=f"some of {','.join(MODES)} (default: {','.join(COMMON_MODES)})",
    )
    parser.add_argument(
        "--attach",
        type=_attached,
        action="append",
        default=[],
        metavar="MODE=URL",
        help="measure a server that is already running, instead of --modes; may be repeated",
    )
    parser.add_argument(
        "--concurrency",
        type=counts,
        help="comma-separated numbers of requests at a time (default: 1,4,16, or none with "
        "--rates)",
    )
    parser.add_argument(
        "--rates",
        type=rates,
        default=[],
        metavar="R,...",
        help="comma-separated numbers of conversations that arrive per second",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="of the arrivals (default: %(default)s)"
    )
    parser.add_argument(
        "--max-ttft-ms", type=not_negative, metavar="MS", help="bound of a good reply, for goodput"
    )
    parser.add_argument(
        "--max-tpot-ms",
        type=not_negative,
        metavar="MS",
        help="bound of a good reply's mean time per token",
    )
    parser.add_argument(
        "--workloads",
        type=_workloads,
        help=f"some of {','.join(FAMILIES)} (default: all of these, or none with --phases), names "
        "of `python -m benchmarks.workloads list`, or files of prompts",
    )
    parser.add_argument(
        "--phases",
        type=_workloads,
        default=[],
        metavar="WORKLOAD,...",
        help="workloads that one run plays after each other, for example chat,editing,chat",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="copies of data sets, as in benchmarks.workloads"
    )
    parser.add_argument(
        "--template",
        choices=("official", "none"),
        default="official",
        help="none: messages without a chat template, as in the paper's table 4",
    )
    parser.add_argument(
        "--sessions",
        type=count,
        default=8,
        help="minimum of sessions of each workload; twice the concurrency if that is more "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=count, default=128, help="of each reply (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=count, default=3, help="measured rounds (default: %(default)s)"
    )
    add_json(parser)
    options = parser.parse_args(arguments)
    attached = [mode for mode, _ in options.attach]
    if attached and options.modes is not None:
        parser.error("--modes names servers to start, --attach running servers: give one of them")
    if len(set(attached)) < len(attached):
        parser.error(f"--attach: {', '.join(attached)}: give each server another name")
    options.modes = options.modes or [*COMMON_MODES]
    if options.workloads is None:
        options.workloads = [] if options.phases else [*FAMILIES]
    if options.concurrency is None:
        options.concurrency = [] if options.rates else [1, 4, 16]
    return options


def _modes(text: str) -> list[str]:
    return _among(text, MODES)


def _workloads(text: str) -> list[str]:
    names = text.split(",")
    try:
        for name in set(names) - set(FAMILIES):
            find(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _among(text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)}: unknown, choose from {', '.join(known)}"
        )
    return names


def _attached(text: str) -> tuple[str, str]:
    mode, _, url = text.partition("=")
    if not (mode and url):
        raise argparse.ArgumentTypeError(f"{text}: give MODE=URL")
    return mode, url.rstrip("/")


if __name__ == "__main__":
    run(main)
