"""The commands that start a server or query one: demo, serve, costs, reload."""

import argparse
from pathlib import Path

from sglang_hvd.commands.arguments import count, output_file
from sglang_hvd.demo.models import SHIPPED, rebuild
from sglang_hvd.user_cache import user_cache


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rebuild",
        type=Path,
        nargs="?",
        const=SHIPPED,
        metavar="DIR",
        help="build the demo models again, and play nothing; takes about half an hour on two cores "
        "(default of DIR: in place of those that ship)",
    )
    parser.add_argument(
        "--modes",
        help="comma-separated list of plain, eagle3, ngram and HVD's policies; plain always runs "
        "(default: all)",
    )
    parser.add_argument(
        "--sessions", type=count, default=2, help="sessions per workload (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the table's rows as JSON"
    )


def run_demo(options: argparse.Namespace) -> int:
    if options.rebuild is not None:
        rebuild(options.rebuild)
        return 0
    # Imported here: only the demo needs torch and an OpenAI client.
    from sglang_hvd.demo import run
    from sglang_hvd.demo.modes import MODES

    asked = options.modes.split(",") if options.modes else list(MODES)
    unknown = sorted(set(asked) - set(MODES))
    if unknown:
        raise ValueError(
            f"--modes: unknown modes {', '.join(unknown)}: choose from {', '.join(MODES)}"
        )
    return run.run_demo(
        modes=[mode for mode in MODES if mode in asked or mode == "plain"],
        num_sessions=options.sessions,
        json_file=options.json,
    )


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="folder of the server's log (default: sglang_hvd in $XDG_CACHE_HOME or ~/.cache)",
    )
    parser.add_argument(
        "--port", type=int, default=30000, help="port of the server (default: %(default)s)"
    )
    parser.epilog = "All other flags are passed to python -m sglang.launch_server."


def run_serve(options: argparse.Namespace) -> int:
    from sglang_hvd.demo import run

    return run.run_serve(
        cache_dir=options.cache_dir or user_cache(),
        port=options.port,
        more_flags=options.more_flags,
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:30000",
        help="address of the server (default: %(default)s)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key, if it has one")


def run_costs(options: argparse.Namespace) -> int:
    from sglang_hvd.commands.running_server import costs_in_force

    print(costs_in_force(options.url, api_key=options.api_key).to_yaml(), end="")
    return 0


def add_reload(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    parser.add_argument(
        "--admin-api-key", metavar="KEY", help="the server's admin key, if it has one"
    )
    parser.add_argument(
        "--predictor",
        type=Path,
        required=True,
        metavar="FILE",
        help="the predictor's path on the server's machine",
    )


def run_reload(options: argparse.Namespace) -> int:
    from sglang_hvd.commands.running_server import reload_predictor

    print(
        reload_predictor(
            options.url,
            options.predictor,
            api_key=options.api_key,
            admin_api_key=options.admin_api_key,
        )
    )
    return 0
