"""The `sglang-hvd` command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sglang_hvd
from sglang_hvd.commands.command_line import Parser, exit_code

# Commands that hand flags which they do not know to SGLang.
_TAKE_MORE_FLAGS = ("serve", "doctor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code."""
    return exit_code(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    commands = _commands()
    options = _options(commands, arguments)
    try:
        return commands[options.command].run(options)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sglang_hvd":
            raise
        is_served = options.command in ("demo", "serve")
        remedy = (
            f"run make {options.command} in a clone of the project"
            if is_served
            else "run pip install '.[train]' in a clone of the project"
        )
        raise ValueError(f"{options.command} needs {error.name}: {remedy}") from None


def _options(
    commands: Mapping[str, Command], arguments: Sequence[str] | None
) -> argparse.Namespace:
    parser = Parser(prog="sglang-hvd", description="Hybrid Verified Decoding for SGLang.")
    parser.add_argument(
        "--version", action="version", version=f"sglang-hvd {sglang_hvd.__version__}"
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, command in commands.items():
        description = f"{command.summary[0].upper()}{command.summary[1:]}."
        command.add(subparsers.add_parser(name, help=command.summary, description=description))
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in _TAKE_MORE_FLAGS:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.more_flags = rest
    return options


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand.

    add: adds its arguments to a parser.
    run: runs it with the parsed arguments and returns the exit code.
    """

    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    summary: str


def _commands() -> Mapping[str, Command]:
    # Imported here, because ctrl-c may come while NumPy is imported.
    from sglang_hvd.commands import (
        cache_commands,
        doctor,
        report_command,
        servers,
        traces,
        view_command,
    )

    return {
        "demo": Command(
            servers.add_demo, servers.run_demo, "compare ways of decoding on the demo models"
        ),
        "serve": Command(servers.add_serve, servers.run_serve, "serve the demo model with HVD"),
        "doctor": Command(
            doctor.add_doctor,
            doctor.run_doctor,
            "say what a server would do here, and what it would refuse",
        ),
        "replay": Command(
            traces.add_replay, traces.run_replay, "compare the policies on recorded generations"
        ),
        "train": Command(
            traces.add_train, traces.run_train, "train a payoff predictor on recorded generations"
        ),
        "evaluate": Command(
            traces.add_evaluate,
            traces.run_evaluate,
            "judge payoff predictors on recorded generations",
        ),
        "analyze": Command(
            traces.add_analyze, traces.run_analyze, "show where and why cache drafts pay off"
        ),
        "view": Command(
            view_command.add_view,
            view_command.run_view,
            "show where each token of a server's replies came from, as a page",
        ),
        "report": Command(
            report_command.add_report,
            report_command.run_report,
            "show what benchmarks.paper measured next to the paper's figures, as a page",
        ),
        "costs": Command(
            servers.add_server, servers.run_costs, "print the step costs of a running server"
        ),
        "reload": Command(
            servers.add_reload, servers.run_reload, "load another predictor into a running server"
        ),
        "warm": Command(
            cache_commands.add_warm,
            cache_commands.run_warm,
            "put texts into the shared cache of a running server",
        ),
        "snapshot": Command(
            cache_commands.add_snapshot,
            cache_commands.run_snapshot,
            "save the shared cache of a running server into a file, or load one",
        ),
        "cache": Command(
            cache_commands.add_cache,
            cache_commands.run_cache,
            "list, erase or resize the shared cache of a running server",
        ),
    }
