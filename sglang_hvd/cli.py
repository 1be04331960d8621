"""The `sglang-hvd` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sglang-hvd", description="Hybrid Verified Decoding for SGLang."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="compare all ways of decoding on the demo models"))
    _add_serve(commands.add_parser("serve", help="serve the demo model with HVD"))
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return _run_demo(options) if options.command == "demo" else _run_serve(options, rest)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_demo(parser: argparse.ArgumentParser) -> None:
    _add_cache_dir(parser)
    parser.add_argument("--modes", help="comma-separated; default: all. plain always runs")
    parser.add_argument(
        "--sessions", type=_count, default=2, help="sessions per workload (default: 2)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's rows as JSON")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_cache_dir(parser)
    parser.add_argument("--port", type=int, default=30000)
    parser.epilog = "Other flags go to python -m sglang.launch_server as they are."


def _add_cache_dir(parser: argparse.ArgumentParser) -> None:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sglang_hvd"
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=default,
        metavar="DIR",
        help="where the demo models are built on first use (default: %(default)s)",
    )


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"at least 1, got {text}")
    return int(text)


def _run_demo(options: argparse.Namespace) -> int:
    # Imported here: the demo needs torch and an OpenAI client, other commands do not.
    from sglang_hvd.demo.modes import MODES
    from sglang_hvd.demo.run import run_demo

    asked = options.modes.split(",") if options.modes else list(MODES)
    unknown = sorted(set(asked) - set(MODES))
    if unknown:
        raise ValueError(f"unknown modes {', '.join(unknown)}: choose from {', '.join(MODES)}")
    if options.json is not None and not options.json.parent.is_dir():
        raise ValueError(f"--json {options.json}: there is no folder {options.json.parent}")
    return run_demo(
        cache_dir=options.cache_dir,
        modes=[mode for mode in MODES if mode in asked or mode == "plain"],
        num_sessions=options.sessions,
        json_file=options.json,
    )


def _run_serve(options: argparse.Namespace, more_flags: Sequence[str]) -> int:
    from sglang_hvd.demo.run import run_serve

    return run_serve(cache_dir=options.cache_dir, port=options.port, more_flags=more_flags)
