"""What benchmarks' command lines have: traces, lists, rows as JSON, and errors in one line."""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from sglang_hvd.commands.arguments import count
from sglang_hvd.commands.exit_code import exit_code
from sglang_hvd.commands.parser import Parser
from sglang_hvd.whole_file import write_whole


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    """name: of the benchmark's module, without the package."""
    return Parser(prog=f"python -m benchmarks.{name}", description=description)


def counts(text: str) -> list[int]:
    """The type of an argument that lists whole numbers from 1 on, by commas."""
    return [count(number) for number in text.split(",")]


def silence_servers() -> None:
    """What a server tells its operator of its predictor would be said of every run."""
    logging.getLogger("sglang_hvd").setLevel(logging.ERROR)


def write_rows(path: Path | None, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes rows, whole or not at all; None: nowhere. Raises ValueError if it cannot."""
    if path is not None:
        write_whole(path, (json.dumps([dict(row) for row in rows], indent=1) + "\n").encode())


def run(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with what main returns, or with 2 and a mistake of the user's in one line,
    as argparse does: 1 says that what was measured is not as it should be."""
    sys.exit(exit_code(main))
