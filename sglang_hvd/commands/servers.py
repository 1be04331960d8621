"""The commands that start a server or query one: demo, serve, costs, reload."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_hvd.commands.arguments import count, output_file
from sglang_hvd.demo.corpus.session import FAMILIES, Family
from sglang_hvd.demo.models import SHIPPED, rebuild
from sglang_hvd.demo.modes import COMMON_MODES, DEFAULT_MODES, GPU_MODES, MODES, PAPER_MODES
from sglang_hvd.plugin.startup.environment import require_cpu_operators
from sglang_hvd.user_cache import user_cache

# They show the range: long copies, short copies, and hardly any.
_DEFAULT_WORKLOADS: tuple[Family, ...] = ("editing", "tool_calls", "chat")
_DEMO_MODES = tuple(mode for mode in MODES if mode not in GPU_MODES)


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
        type=_names("mode", _DEMO_MODES, COMMON_MODES),
        default=DEFAULT_MODES,
        metavar="MODE,...",
        help=f"ways of decoding: some of {', '.join(_DEMO_MODES)}, or all but the last "
        f"{len(PAPER_MODES)}: all; plain always plays (default: {','.join(DEFAULT_MODES)})",
    )
    parser.add_argument(
        "--workloads",
        type=_names("workload", FAMILIES, FAMILIES),
        default=_DEFAULT_WORKLOADS,
        metavar="WORKLOAD,...",
        help=f"kinds of sessions: all, or some of {', '.join(FAMILIES)} (default: "
        f"{','.join(_DEFAULT_WORKLOADS)})",
    )
    parser.add_argument(
        "--sessions", type=count, default=2, help="sessions per workload (default: %(default)s)"
    )
    parser.add_argument(
        "--html",
        type=output_file,
        metavar="FILE",
        help="write a page that shows the source of each token of HVD's replies, and why",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the table's rows as JSON"
    )
    parser.add_argument(
        "--svg", type=output_file, metavar="FILE", help="write what is printed as a picture"
    )


def run_demo(options: argparse.Namespace) -> int:
    if options.rebuild is not None:
        rebuild(options.rebuild)
        return 0
    require_cpu_operators()
    # Imported here: only the demo needs rich and an OpenAI client.
    from sglang_hvd.demo import run

    return run.run_demo(
        modes=[mode for mode in MODES if mode in options.modes or mode == "plain"],
        families=[family for family in FAMILIES if family in options.workloads],
        num_sessions=options.sessions,
        json_file=options.json,
        page_file=options.html,
        picture_file=options.svg,
    )


def _names(
    what: str, names: Sequence[str], all_of_them: Sequence[str]
) -> Callable[[str], Sequence[str]]:
    """The type of an argument that lists some of these names. all_of_them: what "all" means."""

    def asked(text: str) -> Sequence[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in (*names, "all")]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown {what} {', '.join(map(repr, unknown))}: choose from {', '.join(names)}, "
                "or all"
            )
        return all_of_them if "all" in chosen else chosen

    return asked


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
    require_cpu_operators()
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


def add_administered(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    parser.add_argument(
        "--admin-api-key", metavar="KEY", help="the server's admin key, if it has one"
    )


def add_reload(parser: argparse.ArgumentParser) -> None:
    add_administered(parser)
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
