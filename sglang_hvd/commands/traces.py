"""The commands on recorded generations: replay, train, evaluate, analyze."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import get_args

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
from sglang_hvd.commands.files import config_of, open_recordings, write_results
from sglang_hvd.payoff.predictor import Kind
from sglang_hvd.replay.core.model_drafter import ODDS_RATIOS, ModelDrafter
from sglang_hvd.whole_file import write_whole


def add_replay(parser: argparse.ArgumentParser) -> None:
    add_traces(parser)
    add_json(parser)
    add_predictor(parser)
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="table of step costs (see configs/costs), for tokens per millisecond and for policy "
        "allocate (default: the one that --config names)",
    )
    parser.add_argument(
        "--warm-up",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="share of each file's sessions, from the first on, that only fill the shared cache "
        "(default: %(default)g)",
    )
    parser.add_argument(
        "--local-cache",
        action="store_true",
        help="draft from a request's own session only",
    )
    parser.add_argument(
        "--threshold",
        type=not_negative,
        metavar="N",
        help="threshold of policy payoff, as --hvd-threshold",
    )
    parser.add_argument(
        "--model-accepted",
        type=not_negative,
        default=2.0,
        metavar="N",
        help="accepted tokens of the model drafter's draft in each cycle (default: %(default)g)",
    )
    parser.add_argument(
        "--model-drafter",
        choices=list(ODDS_RATIOS),
        default="constant",
        help="how --model-accepted is meant. constant: exactly, in each cycle. independent: on "
        "average, at random. correlated: on average, with more where the cache is right too. "
        "Unless constant, policy allocate has a tree of the model drafter; otherwise and under "
        "other policies it has a chain (default: %(default)s)",
    )


def run_replay(options: argparse.Namespace) -> int:
    from sglang_hvd.costs import StepCosts
    from sglang_hvd.replay.core.policies import replay_policies
    from sglang_hvd.replay.training.tables import policy_table

    config = config_of(options)
    costs = options.costs or config.costs
    with open_recordings(options) as (recordings, tokenizer):
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
        needed = "--costs FILE (configs/costs)" if costs is None else "a predictor of kind survival"
        print(f"policy allocate is left out: it needs {needed}", file=sys.stderr)
    return write_results(options, policy_table(results), [asdict(result) for result in results])


def add_train(parser: argparse.ArgumentParser) -> None:
    add_traces(parser)
    parser.add_argument(
        "--output",
        type=output_file,
        required=True,
        metavar="FILE",
        help="file for the predictor (.safetensors)",
    )
    parser.add_argument(
        "--kind",
        choices=get_args(Kind),
        default="survival",
        help="survival: predicts the distribution of the accepted length. mlp: the paper's "
        "predictor, which also learns as there: at every token, from whole drafts "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--held-out",
        type=share,
        default=0.25,
        metavar="SHARE",
        help="share of each file's sessions that the predictor is judged on, not trained on "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=2,
        metavar="N",
        help="rounds of training; each also learns from the decisions of the predictor before it "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=seed,
        default=42,
        metavar="N",
        help="seed of the training (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=count,
        metavar="N",
        help="rows per update (default of kind survival: 1024; of kind mlp: the paper's 65536, or "
        "fewer if the rows are fewer than 256 times that)",
    )
    parser.add_argument(
        "--epochs",
        type=count,
        metavar="N",
        help="(default of kind survival: 4 to 20, by the number of rows; of kind mlp: the paper's "
        "20)",
    )


def run_train(options: argparse.Namespace) -> int:
    from sglang_hvd.replay.training.tables import heldout_table
    from sglang_hvd.replay.training.train import TrainPlan, few_updates, train_predictors

    plan = TrainPlan(
        config=config_of(options, has_predictor=False),
        held_out=options.held_out,
        num_rounds=options.rounds,
        batch_size=options.batch_size,
        num_epochs=options.epochs,
        seed=options.seed,
        num_processes=options.processes,
    )
    if options.kind == "mlp":
        plan = plan.as_paper()
    with open_recordings(options) as (recordings, tokenizer):
        trained = train_predictors(recordings, [tokenizer], plan, [options.kind])
    predictor = trained[options.kind]
    if few := few_updates(predictor):
        print(few, file=sys.stderr)
    predictor.save(options.output)
    print(heldout_table(predictor))
    print(f"wrote {options.output}")
    return 0


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    add_traces(parser, mode_of=", unless a predictor says")
    add_json(parser)
    parser.add_argument("--predictor", type=Path, metavar="FILE", help="judge this predictor too")
    parser.epilog = (
        "calibration error, worst tenth: the largest gap between predicted and true share in any "
        "tenth of the drafts."
    )


def run_evaluate(options: argparse.Namespace) -> int:
    from sglang_hvd.replay.training.evaluate import evaluate
    from sglang_hvd.replay.training.tables import evaluation_table

    config = config_of(options)
    with open_recordings(options) as (recordings, tokenizer):
        evaluations = evaluate(
            recordings, tokenizer, config=config, num_processes=options.processes
        )
    return write_results(
        options, evaluation_table(evaluations), [evaluation.row() for evaluation in evaluations]
    )


def add_analyze(parser: argparse.ArgumentParser) -> None:
    add_traces(parser, mode_of=", unless a predictor says")
    add_predictor(parser)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write all figures as JSON"
    )
    parser.add_argument("--html", type=output_file, metavar="FILE", help="write a page with plots")


def run_analyze(options: argparse.Namespace) -> int:
    from sglang_hvd.replay.report.analyze import analyze
    from sglang_hvd.replay.report.findings import findings
    from sglang_hvd.replay.report.page import write_page
    from sglang_hvd.view.pages import plain

    if options.json is None and options.html is None:
        raise ValueError("analyze has nothing to write: give --json, --html or both")
    config = config_of(options)
    with open_recordings(options) as (recordings, tokenizer):
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
    """The command line of an analysis, with all options that affect its figures."""
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
