"""Commands on recorded generations: replay, train, evaluate, analyze."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from sglang_hvd.commands.arguments import (
    add_json,
    add_predictor,
    add_traces,
    count,
    not_negative,
    output_file,
    seed,
    share,
)
from sglang_hvd.config import HvdConfig, load_config
from sglang_hvd.payoff.predictor import AcceptancePredictor, Kind, feature_settings
from sglang_hvd.replay.model_drafter import ODDS_RATIOS, ModelDrafter
from sglang_hvd.whole_file import write_whole

if TYPE_CHECKING:
    from sglang_hvd.replay.recordings import Recording
    from sglang_hvd.replay.trace_tokenizer import TraceTokenizer


def add_replay(parser: argparse.ArgumentParser) -> None:
    add_traces(parser)
    add_json(parser)
    add_predictor(parser)
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="cost table (configs/costs), for tokens per millisecond and policy allocate; default: "
        "that of --config, if it names one",
    )
    parser.add_argument(
        "--warm-up",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="share of each file's sessions, the first ones, that only fill the shared cache",
    )
    parser.add_argument(
        "--local-cache", action="store_true", help="draft from a request's own session only"
    )
    parser.add_argument(
        "--threshold",
        type=not_negative,
        metavar="N",
        help="of the payoff policy, as --hvd-threshold",
    )
    parser.add_argument(
        "--model-accepted",
        type=not_negative,
        default=2.0,
        metavar="N",
        help="tokens that the model drafter has accepted in each cycle (default: %(default)g)",
    )
    parser.add_argument(
        "--model-drafter",
        choices=list(ODDS_RATIOS),
        default="constant",
        help="constant: exactly so many. independent, correlated: so many in the mean, at random, "
        "or more where the cache is right too; then policy allocate has a tree of them, and all "
        "others a chain (default: %(default)s)",
    )


def run_replay(options: argparse.Namespace) -> int:
    from sglang_hvd.allocation import StepCosts
    from sglang_hvd.replay.policies import replay_policies
    from sglang_hvd.replay.tables import policy_table

    config = _config(options)
    costs = options.costs or config.costs
    with _read_traces(options) as (recordings, tokenizer):
        results = replay_policies(
            recordings,
            tokenizer,
            config=config,
            costs=None if costs is None else StepCosts.load(costs),
            threshold=config.threshold if options.threshold is None else options.threshold,
            warm_up=options.warm_up,
            shares_cache=not options.local_cache,
            model_drafter=ModelDrafter(options.model_accepted, ODDS_RATIOS[options.model_drafter]),
            num_processes=options.processes,
        )
    if all(result.policy != "allocate" for result in results):
        lacks = "--costs FILE (configs/costs)" if costs is None else "a predictor of kind survival"
        print(f"policy allocate is left out: it needs {lacks}", file=sys.stderr)
    return _show(options, policy_table(results), [asdict(result) for result in results])


def add_train(parser: argparse.ArgumentParser) -> None:
    add_traces(parser)
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
        type=share,
        default=0.25,
        metavar="SHARE",
        help="share of each file's sessions to judge on (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=2,
        metavar="N",
        help="trainings, each on what the one before decides (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=seed, default=42, metavar="N", help="of the training (default: %(default)s)"
    )


def run_train(options: argparse.Namespace) -> int:
    from sglang_hvd.replay.tables import heldout_table
    from sglang_hvd.replay.train import TrainPlan, train_predictors

    plan = TrainPlan(
        config=_config(options, has_predictor=False),
        held_out=options.held_out,
        num_rounds=options.rounds,
        seed=options.seed,
        num_processes=options.processes,
    )
    with _read_traces(options) as (recordings, tokenizer):
        trained = train_predictors(recordings, [tokenizer], plan, [options.kind])
    predictor = trained[options.kind]
    predictor.save(options.output)
    print(heldout_table(predictor))
    print(f"written: {options.output}")
    return 0


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    add_traces(parser, mode_of=", if no predictor says")
    add_json(parser)
    parser.add_argument("--predictor", type=Path, metavar="FILE", help="judge this one too")
    parser.epilog = (
        "calibration error, worst tenth: the largest gap between predicted and real share in any "
        "tenth of the drafts."
    )


def run_evaluate(options: argparse.Namespace) -> int:
    from sglang_hvd.replay.evaluate import evaluate
    from sglang_hvd.replay.tables import evaluation_table

    config = _config(options)
    with _read_traces(options) as (recordings, tokenizer):
        evaluations = evaluate(
            recordings, tokenizer, config=config, num_processes=options.processes
        )
    return _show(
        options, evaluation_table(evaluations), [evaluation.row() for evaluation in evaluations]
    )


def add_analyze(parser: argparse.ArgumentParser) -> None:
    add_traces(parser, mode_of=", if no predictor says")
    add_predictor(parser)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write all figures as JSON"
    )
    parser.add_argument("--html", type=output_file, metavar="FILE", help="write a page with plots")


def run_analyze(options: argparse.Namespace) -> int:
    from sglang_hvd.replay.analyze import analyze
    from sglang_hvd.replay.findings import findings
    from sglang_hvd.replay.page import write_page
    from sglang_hvd.replay.plots import plain

    if options.json is None and options.html is None:
        raise ValueError("nothing to write: give --json, --html or both")
    config = _config(options)
    with _read_traces(options) as (recordings, tokenizer):
        analysis = analyze(
            options.traces,
            recordings,
            tokenizer,
            config=config,
            num_processes=options.processes,
        )
    figures = json.dumps(analysis.as_json(), indent=1, allow_nan=False)
    page = write_page(analysis, command=_command_line(options))
    for path, content in ((options.json, figures), (options.html, page)):
        if path is not None:
            write_whole(path, content.encode())
    for finding in findings(analysis):
        print(f"- {plain(finding.summary)}")
    return 0


def _command_line(options: argparse.Namespace) -> str:
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


def _config(options: argparse.Namespace, *, has_predictor: bool = True) -> HvdConfig:
    """The settings that are asked for. A predictor brings the settings that it was trained for.

    has_predictor: False: the command makes a predictor, and one that is asked for does not count.

    Raises ValueError, in one line, if other settings are asked for than the predictor's.
    """
    names = ("cache_mode", "predictor")
    given = {name: getattr(options, name, None) for name in names}
    settings = {name: value for name, value in given.items() if value is not None}
    asked = load_config(options.config, settings, {})
    if asked.predictor is None or not has_predictor:
        return asked
    trained = AcceptancePredictor.load(asked.predictor).settings
    unasked = {name: trained[name] for name in trained.keys() - asked.model_fields_set}
    # Some settings of a predictor belong to its cache mode alone.
    is_of_mode = "cache_mode" in unasked or asked.cache_mode == trained["cache_mode"]
    config = asked.model_copy(update=unasked) if is_of_mode else asked
    for name, wanted in feature_settings(config).items():
        if wanted != trained[name]:
            raise ValueError(
                f"predictor {asked.predictor} was trained for {name} {trained[name]}, asked for is "
                f"{wanted}: drop that setting, or give another --predictor"
            )
    return config


@contextmanager
def _read_traces(
    options: argparse.Namespace,
) -> Iterator[tuple[list[Recording], TraceTokenizer]]:
    from sglang_hvd.replay.recordings import find_recordings, held
    from sglang_hvd.replay.trace_tokenizer import TraceTokenizer

    tokenizer = TraceTokenizer(options.tokenizer, options.eos_token)
    tokenizer.check()
    found = find_recordings(options.traces)
    _check_outputs(options, [recording.path for recording in found])
    with held(found) as recordings:
        yield recordings, tokenizer


def _check_outputs(options: argparse.Namespace, recordings: list[Path]) -> None:
    """Raises ValueError, in one line, if what a command writes would take the place of what it
    reads or of another file that it writes, or be read as a recording the next time."""
    from sglang_hvd.replay.recordings import SUFFIXES

    names = ("tokenizer", "predictor", "config", "costs")
    given = [getattr(options, name, None) for name in names]
    read = [*recordings, *(path for path in given if path is not None)]
    taken = {path.resolve(): "read" for path in read}
    folder = options.traces.resolve()
    for name in ("json", "html", "output"):
        path: Path | None = getattr(options, name, None)
        if path is None:
            continue
        if (place := path.resolve()) in taken:
            raise ValueError(f"--{name} {path} is {taken[place]} as well: name another file")
        if place.parent == folder and place.suffix in SUFFIXES:
            raise ValueError(
                f"--{name} {path} would be read as a recording the next time: write it elsewhere"
            )
        taken[place] = f"written by --{name}"


def _show(options: argparse.Namespace, table: str, rows: list[dict[str, object]]) -> int:
    # First what took long: printing ends where nobody reads on.
    if options.json is not None:
        write_whole(options.json, json.dumps(rows, indent=1, allow_nan=False).encode())
    print(table)
    return 0
