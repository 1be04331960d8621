"""Repeats the paper's evaluation for one model on this machine.

    python -m benchmarks.paper --model qwen3-8b --out DIR
        [--concurrency 1,8,32] [--rounds 3] [--template both|official|none] [--data-sets ...]
        [-- FLAGS]
    python -m benchmarks.paper join RESULT.json...

The target first replies to the warm-up prompts of each data set. Its replies train the paper's
predictor and warm every mode's cache. Then all modes reply to the measured prompts in turn, one
round after the other. Before each measurement a server's caches are emptied and warmed again.

DIR/result.json is whole after each measurement (sglang_hvd/paper/results.py says what it has).
The same command goes on where a run was broken off. FLAGS are passed to every server.
`join` compares runs of one model on several machines.
"""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.command import counts, parser_of, rates, run
from benchmarks.gpu import check_gpu
from benchmarks.paper.data_sets import SAMPLES, Drawn, drawn_sets, sets_of
from benchmarks.paper.fleet import Fleet
from benchmarks.paper.join import join
from benchmarks.paper.kept import KeptResult
from benchmarks.paper.machine import this_machine, versions
from benchmarks.paper.models import LABELS, folder_of, models
from benchmarks.paper.replies import Asker
from benchmarks.paper.run import TEMPLATE_SET, Plan, Run, predictor_file, tell
from benchmarks.workloads.paper import PAPER
from benchmarks.workloads.prompts import NUM_MEASURED, NUM_WARM_UP, SEED
from sglang_hvd.commands.arguments import count, seed
from sglang_hvd.config import load_config
from sglang_hvd.demo.server import Launch, SglangServer, demo_environment, grace_of
from sglang_hvd.demo.server_forker import ServerForker
from sglang_hvd.paper.results import Result, Template

# A server may download its model first.
_STARTS_WITHIN_S = 3600


def main(arguments: Sequence[str] | None = None, *, launch: Launch | None = None) -> int:
    """launch: starts the servers; None: they are forked for the demo, and spawned otherwise."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["join"]:
        return join(given[1:])
    options = _options(given)
    if options.model != "demo":
        check_gpu(f"--model {options.model}", "--model demo")
    with contextlib.ExitStack() as stack:
        _run(options, given, launch, stack)
    return 0


def _run(
    options: argparse.Namespace,
    given: Sequence[str],
    launch: Launch | None,
    stack: contextlib.ExitStack,
) -> None:
    is_demo = options.model == "demo"
    model = models()[options.model]
    folder: Path = options.out
    logs = folder / "logs"
    sets_of(options.data_sets, folder / "prompts", are_samples=is_demo)  # before a folder is made
    try:
        for needed in (folder / "prompts", logs):
            needed.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: cannot write into {folder}: {error.strerror}") from None
    target = folder_of(model.target, "tokenizer*", "*.json", "*.jinja")
    drafter = folder_of(model.drafter, "*.json")
    drawn = drawn_sets(
        options.data_sets,
        folder / "prompts",
        are_samples=is_demo,
        copies=options.data,
        num_measured=options.prompts,
        num_at_once=max(options.concurrency),
        num_warm_up=options.warm_up_prompts,
        seed=options.seed,
    )
    asker = Asker(target, options.max_tokens or model.max_new_tokens, model.max_sequence)
    asker.tokenizer.check()
    shared = (
        *(*model.shared, "--max-running-requests"),
        str(max_running(options.concurrency, options.rates, drawn)),
        *options.flags,
    )
    modes = model.modes(options.modes, predictor_file(folder))
    found = versions(has_gpu=not is_demo)
    if not is_demo:  # the cache of the hub names folders by revision
        found |= {model.target: target.name, model.drafter: drafter.name}
    begun = Result(
        model=options.model,
        target=model.target,
        drafter=model.drafter,
        machine=this_machine(has_gpu=not is_demo),
        versions=found,
        command=shlex.join(["python", "-m", "benchmarks.paper", *given]),
        started=datetime.now(UTC),
        seed=options.seed,
        max_new_tokens=asker.max_tokens,
        shared_flags=shared,
        modes=modes,
        data_sets=tuple(of_set.about for of_set in drawn),
        training=None,
        measurements=(),
        selections=(),
        is_complete=False,
    )
    kept = stack.enter_context(contextlib.closing(KeptResult(folder, begun)))
    flags = {mode.name: mode.flags for mode in modes}
    if is_demo and launch is None:
        launch = stack.enter_context(ServerForker(demo_environment())).launch

    def make(mode: str) -> SglangServer:
        return SglangServer(
            ["--model-path", model.target, *shared, *flags[mode]],
            # A log of its own, since that of a server that ended says why.
            log_file=logs / f"{mode}-{len(list(logs.glob(f'{mode}-[0-9]*.log')))}.log",
            environment={**(demo_environment() if is_demo else {}), **model.environment},
            timeout_s=_STARTS_WITHIN_S,
            grace_s=grace_of("cpu" if is_demo else "cuda"),
            launch=launch,
        )

    fleet = stack.enter_context(
        contextlib.closing(Fleet(make, options.servers or (len(modes) if is_demo else 1)))
    )
    template: Template = "none" if options.template == "none" else "official"
    plan = Plan(
        concurrency=tuple(options.concurrency),
        rates=tuple(options.rates),
        rounds=options.rounds,
        template=template,
        with_table_4=options.template == "both",
    )
    config = load_config(model.paper_config, {}, {})
    of_name = {of_set.about.name: of_set for of_set in drawn}
    Run(folder, kept, fleet, plan, asker, of_name, config).go()
    tell(f"wrote {kept.path}")


def max_running(
    concurrency: Sequence[int], rates: Sequence[float], data_sets: Sequence[Drawn]
) -> int:
    """Requests that a server runs at a time.

    In an open loop no request may wait for another, so all prompts of a data set may run at once.
    """
    num_open = [len(drawn.prompts_for(1)) for drawn in data_sets] if rates else []
    return max([*concurrency, *num_open])


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("paper", "Repeat the paper's evaluation.")
    names = [workload.name for workload in PAPER]
    parser.add_argument("--model", choices=list(models()), required=True, help="what is served")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of the result; a run that was broken off goes on there",
    )
    parser.add_argument(
        "--modes",
        type=_among(list(LABELS)),
        default=list(LABELS),
        metavar="M,...",
        help=f"some of {','.join(LABELS)}; greedy is always served (default: all)",
    )
    parser.add_argument(
        "--data-sets",
        type=lambda text: text.split(","),
        metavar="D,...",
        help="some of the paper's, other names of `python -m benchmarks.workloads list`, or files "
        f"of prompts (default: {','.join(names)}; of the demo, whose prompts are samples, "
        f"{','.join(SAMPLES)})",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="copies of data sets, as in benchmarks.workloads"
    )
    parser.add_argument(
        "--template",
        choices=("both", "official", "none"),
        default="both",
        help=f"official: the target's chat template. none: messages without one. both: official, "
        f"and {TEMPLATE_SET} without one too, as in table 4 (default: %(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=counts,
        default=[1, 8, 32],
        metavar="N,...",
        help="requests at a time; a data set has as many prompts at least (default: 1,8,32)",
    )
    parser.add_argument(
        "--rates",
        type=rates,
        default=[],
        metavar="R,...",
        help="requests that arrive per second, in an open loop (default: none)",
    )
    parser.add_argument(
        "--rounds", type=count, default=3, help="of all measurements (default: %(default)s)"
    )
    parser.add_argument(
        "--prompts",
        type=count,
        default=NUM_MEASURED,
        metavar="N",
        help="measured prompts of each data set (default: the paper's %(default)s)",
    )
    parser.add_argument(
        "--warm-up-prompts",
        type=count,
        default=NUM_WARM_UP,
        metavar="N",
        help="prompts whose replies warm the caches and train the predictor (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=count,
        metavar="N",
        help="of each reply (default: the paper's 8192; of the demo 64)",
    )
    parser.add_argument(
        "--seed", type=seed, default=SEED, help="of draws, training and arrivals (default: 42)"
    )
    parser.add_argument(
        "--servers",
        type=count,
        metavar="N",
        help="that are up at a time (default: 1; of the demo all)",
    )
    parser.add_argument(
        "flags", nargs="*", metavar="FLAGS", help="after --: more flags of every server"
    )
    options = parser.parse_args(arguments)
    options.modes = [name for name in LABELS if name == "greedy" or name in options.modes]
    if options.data_sets is None:
        options.data_sets = list(SAMPLES) if options.model == "demo" else names
    return options


def _among(known: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = text.split(",")
        unknown = [name for name in found if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)}: unknown, choose from {', '.join(known)}"
            )
        return found

    return names


if __name__ == "__main__":
    run(main)
