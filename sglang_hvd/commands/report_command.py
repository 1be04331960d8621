"""The command report: results of benchmarks.paper as a page."""

import argparse
import shlex
from pathlib import Path

from sglang_hvd.commands.arguments import output_file
from sglang_hvd.whole_file import write_whole


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        metavar="RESULT.json",
        help="result of python -m benchmarks.paper; several of one model are put side by side",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=output_file,
        required=True,
        metavar="FILE",
        help="HTML page to write",
    )


def run_report(options: argparse.Namespace) -> int:
    # Imported here: only a page needs jinja2 and matplotlib.
    from sglang_hvd.paper.result_page import write_page
    from sglang_hvd.paper.results import read_result

    for number, path in enumerate(options.results):
        if path.resolve() in [other.resolve() for other in options.results[:number]]:
            raise ValueError(f"{path} is given twice: name each result once")
    results = [read_result(path) for path in options.results]
    first = results[0]
    for path, result in zip(options.results, results, strict=True):
        if (result.model, result.target) != (first.model, first.target):
            raise ValueError(
                f"{path} is of {result.model} ({result.target}), but {options.results[0]} of "
                f"{first.model} ({first.target}): report the runs of each model by themselves"
            )
    if options.output.resolve() in [path.resolve() for path in options.results]:
        raise ValueError(f"--output {options.output} is also read: name another file")
    words = ["sglang-hvd", "report", *map(str, options.results), "-o", str(options.output)]
    write_whole(options.output, write_page(results, command=shlex.join(words)).encode())
    return 0
