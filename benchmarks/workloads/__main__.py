"""Says what the workloads are.

    python -m benchmarks.workloads list
    python -m benchmarks.workloads show NAME|FILE [--data DIR] [--tokenizer FILE]

NAME is one of the list, FILE a file of prompts, a recording, a text trace or a chat log.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.command import parser_of, run
from benchmarks.workloads.catalogue import find, workloads
from benchmarks.workloads.prompts import SEED, draw
from sglang_hvd.replay.training.tables import markdown_table
from sglang_hvd.traces.chat_templates import ChatTemplate
from sglang_hvd.traces.tokenizer_json import load_tokenizer

_NUM_SHOWN = 3
_MAX_SHOWN_CHARS = 1200


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.command == "list":
        columns = ("name", "family", "source", "licence", "size", "note")
        rows = map(asdict, workloads().values())
        print(markdown_table({name: name for name in columns}, rows, num_labels=len(columns)))
    else:
        _show(options)


def _show(options: argparse.Namespace) -> None:
    workload = find(options.name, options.tokenizer)
    for field in ("name", "family", "source", "licence", "size", "note"):
        if told := getattr(workload, field):
            print(f"{field + ':':9}{told}")
    template = ChatTemplate(options.tokenizer) if options.template == "official" else None
    drawn = draw(workload, folder=options.data, seed=options.seed)
    print(f"drawn:   {len(drawn.measured)} to measure, {len(drawn.warm_up)} to warm up")
    for number, prompt in enumerate(drawn.measured[:_NUM_SHOWN], start=1):
        request = prompt.request(template)
        told = request.get("text") or _decoded(request["input_ids"], options.tokenizer)
        print(f"\n--- prompt {number}, {len(told):,} characters ---\n{_cut(told)}")
        for said in prompt.follow_ups:
            print(f"--- then ---\n{_cut(said)}")


def _decoded(token_ids: Sequence[int], tokenizer_file: Path | None) -> str:
    if tokenizer_file is None:
        return " ".join(map(str, token_ids))
    return str(load_tokenizer(tokenizer_file).decode(token_ids, skip_special_tokens=False))


def _cut(text: str) -> str:
    if len(text) <= _MAX_SHOWN_CHARS:
        return text
    return f"{text[:_MAX_SHOWN_CHARS]} [... {len(text) - _MAX_SHOWN_CHARS:,} more characters]"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("workloads", "Say what the workloads are.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="one line for each workload")
    show = commands.add_parser("show", help="a workload with three of its measured prompts")
    show.add_argument("name", help="a name of the list, or a file")
    show.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with copies of data sets as DIR/OWNER/NAME, for use without a network",
    )
    show.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json of the target model; its chat template renders the prompts "
        "(default: ChatML)",
    )
    show.add_argument(
        "--template",
        choices=("official", "none"),
        default="official",
        help="none: messages without a chat template, as in the paper's table 4",
    )
    show.add_argument("--seed", type=int, default=SEED, help="of the draw (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(main)
