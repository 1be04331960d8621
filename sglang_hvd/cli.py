"""The `sglang-hvd` command."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

from sglang_hvd.config import CacheMode, HvdConfig, load_config
from sglang_hvd.demo.server import ServerFailed
from sglang_hvd.payoff.predictor import Kind, PayoffPredictor, feature_settings
from sglang_hvd.replay.model_drafter import ODDS_RATIOS, ModelDrafter
from sglang_hvd.user_cache import user_cache
from sglang_hvd.whole_file import output_file, write_whole

if TYPE_CHECKING:
    from sglang_hvd.replay.recordings import Recording
    from sglang_hvd.replay.trace_tokenizer import TraceTokenizer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    parser = _Parser(prog="sglang-hvd", description="Hybrid Verified Decoding for SGLang.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (add, _, summary) in _COMMANDS.items():
        add(commands.add_parser(name, help=summary))
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.more_flags = rest
    try:
        return _COMMANDS[options.command][1](options)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sglang_hvd":
            raise
        is_served = options.command in ("demo", "serve")
        remedy = "make venv" if is_served else "pip install --editable '.[train]'"
        told = f"{options.command} needs {error.name}: run {remedy} in this project's folder"
    except (ValueError, ServerFailed) as error:
        told = str(error)
    print(f"error: {told}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything here does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    _add_cache_dir(parser)
    parser.add_argument("--modes", help="comma-separated; default: all. plain always runs")
    parser.add_argument(
        "--sessions", type=_count, default=2, help="sessions per workload (default: 2)"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the table's rows as JSON"
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_cache_dir(parser)
    parser.add_argument("--port", type=int, default=30000)
    parser.epilog = "Other flags go to python -m sglang.launch_server."


def _add_cache_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="where the demo models are built on first use (default: sglang_hvd in $XDG_CACHE_HOME "
        "or ~/.cache)",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, got {text}")
    return int(text)


def _not_negative(text: str) -> float:
    number = _number(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"at least 0, got {text}")
    return number


def _share(text: str) -> float:
    number = _number(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"from 0 to below 1, got {text}")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number, got {text}") from None


def _run_demo(options: argparse.Namespace) -> int:
    # Imported here: the demo needs torch and an OpenAI client, other commands do not.
    from sglang_hvd.demo.modes import MODES
    from sglang_hvd.demo.run import run_demo

    asked = options.modes.split(",") if options.modes else list(MODES)
    unknown = sorted(set(asked) - set(MODES))
    if unknown:
        raise ValueError(f"unknown modes {', '.join(unknown)}: choose from {', '.join(MODES)}")
    return run_demo(
        cache_dir=options.cache_dir or user_cache(),
        modes=[mode for mode in MODES if mode in asked or mode == "plain"],
        num_sessions=options.sessions,
        json_file=options.json,
    )


def _run_serve(options: argparse.Namespace) -> int:
    from sglang_hvd.demo.run import run_serve

    return run_serve(
        cache_dir=options.cache_dir or user_cache(),
        port=options.port,
        more_flags=options.more_flags,
    )


def _add_traces(parser: argparse.ArgumentParser, *, mode_of: str = "") -> None:
    parser.add_argument(
        "--traces",
        "--from",
        type=Path,
        required=True,
        metavar="DIR",
        help="recordings (.hvdt), text traces or chat logs (.jsonl): a folder, or one file",
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="FILE", help="tokenizer.json for them"
    )
    parser.add_argument(
        "--eos-token",
        default="<|im_end|>",
        metavar="TOKEN",
        help="ends every output of text traces; empty: nothing does (default: %(default)s)",
    )
    parser.add_argument(
        "--cache-mode",
        choices=get_args(CacheMode),
        help=f"how the suffix cache drafts{mode_of} (default: {HvdConfig().cache_mode})",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="other settings of the server, as --hvd-config"
    )
    parser.add_argument(
        "--processes",
        type=_count,
        default=min(8, os.cpu_count() or 1),
        metavar="N",
        help="replay so many recordings at a time (default: %(default)s)",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows as JSON")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    _add_traces(parser)
    _add_json(parser)
    parser.add_argument(
        "--predictor",
        type=Path,
        metavar="FILE",
        help="default: that of --config, or else the one that ships",
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="cost table (configs/costs), for tokens per millisecond and policy allocate; default: "
        "that of --config, if it names one",
    )
    parser.add_argument(
        "--warm-up",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="share of each file's sessions, the first ones, that only fill the shared cache",
    )
    parser.add_argument(
        "--local-cache", action="store_true", help="draft from a request's own session only"
    )
    parser.add_argument(
        "--threshold",
        type=_not_negative,
        metavar="N",
        help="of the payoff policy, as --hvd-threshold",
    )
    parser.add_argument(
        "--model-accepted",
        type=_not_negative,
        default=2.0,
        metavar="N",
        help="tokens that the model drafter has accepted in each cycle (default: %(default)g)",
    )
    parser.add_argument(
        "--model-drafter",
        choices=list(ODDS_RATIOS),
        default="constant",
        help="constant: exactly so many. independent, correlated: so many in the mean, at random, "
        "or more where the cache is right too (default: %(default)s)",
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_traces(parser)
    parser.add_argument(
        "--output", type=output_file, required=True, metavar="FILE", help="predictor (.safetensors)"
    )
    parser.add_argument(
        "--kind",
        choices=get_args(Kind),
        default="survival",
        help="survival: the distribution of the accepted length. mlp: the paper's predictor",
    )
    parser.add_argument(
        "--held-out",
        type=_share,
        default=0.25,
        metavar="SHARE",
        help="share of each file's sessions to judge on (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=_count, default=2, help="see docs/payoff.md")
    parser.add_argument("--seed", type=int, default=42)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    _add_traces(parser, mode_of=", if no predictor says")
    _add_json(parser)
    parser.add_argument("--predictor", type=Path, metavar="FILE", help="judge this one too")


def _add_analyze(parser: argparse.ArgumentParser) -> None:
    _add_traces(parser, mode_of=", if no predictor says")
    parser.add_argument(
        "--predictor",
        type=Path,
        metavar="FILE",
        help="default: that of --config, or else the one that ships",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write all figures as JSON"
    )
    parser.add_argument("--html", type=output_file, metavar="FILE", help="write a page with plots")


def _run_replay(options: argparse.Namespace) -> int:
    from sglang_hvd.allocation import StepCosts
    from sglang_hvd.replay.policies import replay_policies
    from sglang_hvd.replay.tables import policy_table

    config = _config(options)
    costs = options.costs or config.costs
    recordings, tokenizer = _read_traces(options)
    results = replay_policies(
        recordings,
        tokenizer,
        config=config,
        costs=None if costs is None else StepCosts.load(costs),
        warm_up=options.warm_up,
        shares_cache=not options.local_cache,
        model_drafter=ModelDrafter(options.model_accepted, ODDS_RATIOS[options.model_drafter]),
        num_processes=options.processes,
    )
    if costs is None:
        print("policy allocate is left out: it needs --costs FILE (configs/costs)", file=sys.stderr)
    return _show(options, policy_table(results), [asdict(result) for result in results])


def _run_train(options: argparse.Namespace) -> int:
    from sglang_hvd.replay.tables import heldout_table
    from sglang_hvd.replay.train import TrainPlan, train_predictor

    recordings, tokenizer = _read_traces(options)
    plan = TrainPlan(
        config=_config(options),
        kind=options.kind,
        held_out=options.held_out,
        num_rounds=options.rounds,
        seed=options.seed,
        num_processes=options.processes,
    )
    predictor = train_predictor(recordings, tokenizer, plan)
    predictor.save(options.output)
    print(heldout_table(predictor))
    print(f"written: {options.output}")
    return 0


def _run_evaluate(options: argparse.Namespace) -> int:
    from sglang_hvd.replay.evaluate import evaluate
    from sglang_hvd.replay.tables import evaluation_table

    config = _config(options)
    recordings, tokenizer = _read_traces(options)
    evaluations = evaluate(
        recordings,
        tokenizer,
        config=config,
        num_processes=options.processes,
    )
    return _show(
        options, evaluation_table(evaluations), [evaluation.row() for evaluation in evaluations]
    )


def _run_analyze(options: argparse.Namespace) -> int:
    from sglang_hvd.replay.analyze import analyze
    from sglang_hvd.replay.findings import findings
    from sglang_hvd.replay.page import write_page
    from sglang_hvd.replay.plots import plain

    if options.json is None and options.html is None:
        raise ValueError("nothing to write: give --json, --html or both")
    config = _config(options)
    recordings, tokenizer = _read_traces(options)
    analysis = analyze(
        options.traces,
        recordings,
        tokenizer,
        config=config,
        num_processes=options.processes,
    )
    figures = json.dumps(analysis.as_json(), indent=1, allow_nan=False)
    page = write_page(analysis, command=_command(options))
    for path, content in ((options.json, figures), (options.html, page)):
        if path is not None:
            write_whole(path, content.encode())
    for finding in findings(analysis):
        print(f"- {plain(finding.summary)}")
    return 0


def _command(options: argparse.Namespace) -> str:
    """An analysis's command line, with all that decides its figures."""
    names = [
        *("traces", "tokenizer", "eos_token", "cache_mode", "config", "predictor"),
        *("json", "html"),
    ]
    given = {name: getattr(options, name) for name in names}
    flags = [
        text
        for name, value in given.items()
        if value is not None
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    return shlex.join(["sglang-hvd", options.command, *flags])


def _run_reload(options: argparse.Namespace) -> int:
    from sglang_hvd.running_server import reload_predictor

    print(
        reload_predictor(
            options.url,
            options.predictor,
            api_key=options.api_key,
            admin_api_key=options.admin_api_key,
        )
    )
    return 0


def _run_costs(options: argparse.Namespace) -> int:
    from sglang_hvd.running_server import costs_in_force

    print(costs_in_force(options.url, api_key=options.api_key).to_yaml(), end="")
    return 0


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="default: %(default)s")
    parser.add_argument("--api-key", metavar="KEY", help="of a server that asks for one")


def _add_reload(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)  # which server
    parser.add_argument("--admin-api-key", metavar="KEY", help="of a server that has one")
    parser.add_argument(
        "--predictor", type=Path, required=True, metavar="FILE", help="as the server sees it"
    )


def _config(options: argparse.Namespace) -> HvdConfig:
    """The asked settings, the predictor to judge among them; those that it depends on are the
    predictor's, if nothing else is asked. Raises ValueError if something else is."""
    names = ("cache_mode", "threshold", "predictor")
    given = {name: getattr(options, name, None) for name in names}
    settings = {name: value for name, value in given.items() if value is not None}
    asked = load_config(options.config, settings, {})
    if asked.predictor is None or options.command == "train":
        return asked
    trained = PayoffPredictor.load(asked.predictor).settings
    unasked = {name: trained[name] for name in trained.keys() - asked.model_fields_set}
    # Some of its settings are of its cache mode alone.
    is_of_mode = "cache_mode" in unasked or asked.cache_mode == trained["cache_mode"]
    config = asked.model_copy(update=unasked) if is_of_mode else asked
    for name, wanted in feature_settings(config).items():
        if wanted != trained[name]:
            raise ValueError(
                f"predictor {asked.predictor} was trained for {name} {trained[name]}, asked for is "
                f"{wanted}"
            )
    return config


def _read_traces(options: argparse.Namespace) -> tuple[list[Recording], TraceTokenizer]:
    from sglang_hvd.replay.recordings import find_recordings
    from sglang_hvd.replay.trace_tokenizer import TraceTokenizer

    tokenizer = TraceTokenizer(options.tokenizer, options.eos_token or None)
    tokenizer.check()
    return find_recordings(options.traces), tokenizer


def _show(options: argparse.Namespace, table: str, rows: list[dict[str, object]]) -> int:
    print(table)
    if options.json is not None:
        write_whole(options.json, json.dumps(rows, indent=1, allow_nan=False).encode())
    return 0


_COMMANDS: Mapping[
    str,
    tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str],
] = {
    "demo": (_add_demo, _run_demo, "compare all ways of decoding on the demo models"),
    "serve": (_add_serve, _run_serve, "serve the demo model with HVD"),
    "replay": (_add_replay, _run_replay, "compare the policies on recorded generations"),
    "train": (_add_train, _run_train, "train a payoff predictor on recorded generations"),
    "evaluate": (_add_evaluate, _run_evaluate, "judge payoff predictors on recordings"),
    "analyze": (_add_analyze, _run_analyze, "show where and why cache drafts pay off"),
    "costs": (_add_server, _run_costs, "print what steps cost on a running server"),
    "reload": (_add_reload, _run_reload, "give a running server another predictor"),
}
