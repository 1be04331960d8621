"""What the benchmarks' command lines have in common."""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from sglang_hvd.commands.arguments import count, not_negative
from sglang_hvd.commands.command_line import Parser, exit_code
from sglang_hvd.whole_file import write_whole


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    """A parser whose errors are one line. name: the benchmark's module, without the package."""
    return Parser(prog=f"python -m benchmarks.{name}", description=description)


def counts(text: str) -> list[int]:
    """The type of an argument that lists whole numbers from 1 on, separated by commas."""
    return [count(number) for number in text.split(",")]


def rates(text: str) -> list[float]:
    """The type of an argument that lists numbers above 0, separated by commas."""
    found = [not_negative(number) for number in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"numbers above 0, got {text}")
    return found


def silence_servers() -> None:
    """Hides messages for a server's operator, which every replay would repeat."""
    logging.getLogger("sglang_hvd").setLevel(logging.ERROR)


def write_rows(path: Path | None, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes rows as JSON, completely or not at all. path: None: nothing is written.

    Raises ValueError if the file cannot be written.
    """
    if path is not None:
        write_whole(path, (json.dumps([dict(row) for row in rows], indent=1) + "\n").encode())


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs main and ends the process with its exit code.

    A user's mistake is one line on stderr and exit code 2, as with argparse. Exit code 1 means that
    a measured result is wrong.
    """
    sys.exit(exit_code(main))
