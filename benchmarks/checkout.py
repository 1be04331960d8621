"""Servers that run the code of another checkout, such as that of an earlier commit."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from sglang_hvd.demo.server import Launch, Process, spawn


def add_against(parser: argparse.ArgumentParser) -> None:
    """Adds --against CHECKOUT."""
    parser.add_argument(
        "--against",
        type=_checkout,
        metavar="CHECKOUT",
        help="also run the code of this checkout, which has its own .venv, and compare with it",
    )


def launch_of(checkout: Path | None) -> Launch | None:
    """Starts servers of the code in a checkout, as SglangServer takes it. None: of this code."""
    if checkout is None:
        return None
    python = str(checkout / ".venv" / "bin" / "python")

    def launch(command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> Process:
        # Otherwise the working directory, which may be another checkout, comes first.
        given = {**environment, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
        return spawn([python, *command[1:]], given, log)

    return launch


def _checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / ".venv" / "bin" / "python").exists():
        raise argparse.ArgumentTypeError(f"{text}: has no .venv: run `make venv` there")
    return path
