"""Compares ways of decoding: throughput, latency and the source of the tokens.

    python -m benchmarks.serving --modes plain,eagle3,ngram,cache,frequency,payoff,allocate
        --concurrency 1,4,16 [--json FILE]
    python -m benchmarks.serving --attach plain=URL --attach payoff=URL [--concurrency 1,4,16] ...
    python -m benchmarks.serving ... --rates 1,2,4 --max-ttft-ms 500 --max-tpot-ms 50
    python -m benchmarks.serving ... --workloads mt-bench,delegate-52,mine.jsonl --max-tokens 8192

Each mode is a server of its own on the demo models, or one that is already running. All servers
stay up together and take turns, in another order each time, so that other load on the machine
affects all of them alike. Each server's caches are flushed before each measurement. The first round
is not counted.

--concurrency is a closed loop: a conversation begins when another has ended. --rates is an open
loop: conversations arrive at random, at so many per second, whether or not the server keeps up.
"""

import argparse
import contextlib
import json
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
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
from sglang_hvd.demo.modes import COMMON_MODES, MODES, PAPER_MODES, server_flags
from sglang_hvd.demo.server import CPU_FLAGS, SglangServer, demo_environment

_SEED = 11

_TokenIds = Mapping[tuple[int, int], tuple[int, ...]]  # by conversation and turn


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    with contextlib.ExitStack() as stack:
        urls = dict(options.attach) or stack.enter_context(_servers(options.modes))
        bounds = Bounds(options.max_ttft_ms, options.max_tpot_ms)
        rows = measure(
            urls,
            _cells(urls, options),
            rounds=options.rounds,
            bounds=None if bounds == Bounds() else bounds,
            seed=options.seed,
        )
    print(table_of(rows))
    write_rows(options.json, map(asdict, rows))
    return 0 if all(row.outputs_identical and row.is_complete for row in rows) else 1


@contextlib.contextmanager
def _servers(modes: Sequence[str]) -> Iterator[dict[str, str]]:
    models = demo_models()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {}
        for mode in modes:
            flags = [*CPU_FLAGS, *server_flags(mode, models)]  # type: ignore[arg-type]
            server = SglangServer(
                flags, log_file=folder / f"{mode}.log", environment=demo_environment()
            )
            urls[mode] = stack.enter_context(server).url
        yield urls


class _OfServer:
    """The chat template of a server's tokenizer."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(f"{url}/model_info", timeout=60) as response:
            self._tokenizer = AutoTokenizer.from_pretrained(json.load(response)["tokenizer_path"])

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        rendered = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
        return str(rendered)


def _prompts(name: str, num: int, options: argparse.Namespace) -> list[Prompt]:
    """The prompts of a family of the demo, or else the measured prompts of a workload."""
    if name not in FAMILIES:
        return [*draw(find(name), folder=options.data, num_measured=num).measured]
    sessions = demo_sessions(name, count=num, seed=_SEED)
    return [Prompt.of_user(*(turn.user for turn in session.turns)) for session in sessions]


def _cells(urls: Mapping[str, str], options: argparse.Namespace) -> list[Cell]:
    """The cells of all workloads. The expected answers are those of plain decoding, one request at
    a time, or of the first mode if no server decodes plainly."""
    url = urls.get("plain", next(iter(urls.values())))
    template = _OfServer(url) if options.template == "official" else None

    def request(prompt: Prompt) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": options.max_tokens}
        return {**prompt.request(template), "sampling_params": sampling}

    num = _num_sessions(max(options.concurrency, default=0), options)
    cells = []
    for name in options.workloads:
        family = name if name in FAMILIES else find(name).family
        prompts = _prompts(name, num, options)
        conversations = [conversation_of(prompt, request) for prompt in prompts]
        expected = {
            (answer.conversation, answer.turn): answer.token_ids
            for answer in play(url, conversations, concurrency=1).answers
        }

        def is_expected(answer: Answer, expected: _TokenIds = expected) -> bool:
            return expected[answer.conversation, answer.turn] == answer.token_ids

        cells += [
            Cell(
                name,
                family,
                concurrency,
                conversations[: _num_sessions(concurrency, options)],
                is_expected,
            )
            for concurrency in options.concurrency
        ]
        cells += [
            Cell(name, family, len(conversations), conversations, is_expected, rate)
            for rate in options.rates
        ]
    return cells


def _num_sessions(concurrency: int, options: argparse.Namespace) -> int:
    """Enough sessions for each concurrent slot to run two: slots stay empty at the end of a run."""
    return max(int(options.sessions), 2 * concurrency)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("serving", "Compare ways of decoding.")
    parser.add_argument(
        "--modes",
        type=_modes,
        help=f"some of {','.join(MODES)} (default: all but {','.join(PAPER_MODES)})",
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
        default=list(FAMILIES),
        help=f"some of {','.join(FAMILIES)} (default: all of these), names of `python -m "
        "benchmarks.workloads list`, or files of prompts",
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
