"""What each policy makes of recorded generations under tables of costs, at several batch sizes.

    python -m benchmarks.replay --traces DIR --tokenizer FILE --costs FILE... [--json FILE]

Sessions that the shipped predictor was trained on fill the shared cache and are not counted. The
model drafter is simulated (sglang_hvd/replay/model_drafter.py). Each policy but `allocate` is run
with several settings, and the rows are of the one that is best for all files at that batch size,
with the first seed: the size of the model drafter's tree for `model`, which the others then take,
the widest verification for them, and the threshold for "payoff fixed". A step is as wide as its
drafts need.

`allocate` chooses all of that itself, up to 64 nodes; "allocate, width 32" up to as many as a
server has by default for more than two requests. "allocate, one tree" cannot choose the number of
steps: it has the tree of `model` or smaller ones, as a server without room for drafts of fewer
steps; and the cache drafts of "allocate, chains" do not branch. A draft of few steps costs as many
nodes as one of all, more than a server's has: that speaks against `allocate`. The oracle allocates
like `allocate` and knows what each draft will bring; "oracle, one tree" likewise. "knows cache
drafts" predicts the model drafter's as `allocate` does, "knows model drafts" the other way round.

Each cell, which is a batch size and a model drafter, prints its policies with their settings and
their regret to the oracle, then speeds over that of plain serving, by family and with the lowest
file. The last tables, one of each of --costs, have the cells side by side.

With `--wait` every step waits so long for the host, but for those of `plain`, and those of
`allocate` that run ahead; "allocate, waits" has none of these.

With several seeds everything is served as often, each time with another draw of the model drafter,
from other places of the texts; rows are of all together. With the default of tokens texts are taken
up at eight places at least, with each seed.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import get_args

from tqdm import tqdm

from benchmarks.command import parser_of, run, write_rows
from benchmarks.replay.disturbed import DISTURBANCES, LEARNERS
from benchmarks.replay.jobs import Job, run_job, set_up_process
from benchmarks.replay.rows import (
    Row,
    beside_oracle,
    disturbed_table_of,
    plain_table_of,
    summary_of,
    table_of,
)
from benchmarks.replay.settings import (
    MODEL_TREES,
    WAITING,
    Setting,
    disturbed_settings,
    settings_of,
)
from sglang_hvd.allocation import OWN_PACE
from sglang_hvd.commands.arguments import add_cache_mode, add_json, add_texts, count, not_negative
from sglang_hvd.config import PostponeExtend
from sglang_hvd.costs import StepCosts
from sglang_hvd.payoff import SIZE_EFFECT
from sglang_hvd.replay.metrics import mean_over_families
from sglang_hvd.replay.model_drafter import ODDS_RATIOS, STRENGTHS, ModelDrafter
from sglang_hvd.replay.recordings import find_recordings
from sglang_hvd.replay.trace_tokenizer import TraceTokenizer
from sglang_hvd.replay.trained_on import NOTHING_LEFT
from sglang_hvd.replay.workers import Workers, workers


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    drafters = {
        f"{strength}, {kind}": ModelDrafter(
            STRENGTHS[strength],
            ODDS_RATIOS[kind],
            size_effect=options.size_effect,
            spread=options.spread,
        )
        for strength in options.strengths
        for kind in options.kinds
    }
    recordings = find_recordings(options.traces)
    tokenizer = TraceTokenizer(options.tokenizer, options.eos_token)
    tables = _tables(options.costs)
    if options.wait:
        tables = {
            name: costs.model_copy(update={"wait": (options.wait,) * len(costs.batch_sizes)})
            for name, costs in tables.items()
        }
    _check_policies(options.policies or (), tables)
    cells = [
        (name, costs, batch_size, drafter_name, drafter)
        for name, costs in tables.items()
        for batch_size in options.batch_sizes
        for drafter_name, drafter in drafters.items()
    ]
    documents = next(r for r in recordings if "qmsum" in r.name) if options.disturbed else None
    rows: list[Row] = []
    with workers(options.processes, set_up_process, tokenizer) as pool:
        bar = tqdm(cells, unit="cell", disable=None)
        for name, costs, batch_size, drafter_name, drafter in bar:
            jobs = [
                Job(
                    recording,
                    name,
                    costs,
                    batch_size,
                    drafter_name,
                    drafter,
                    options.cache_mode,
                    max(options.tokens, options.tokens_per_request * batch_size),
                    options.seeds,
                    options.postpone_extend,
                    options.own_pace,
                    documents,
                )
                for recording in recordings
                if not options.files or recording.name in options.files
            ]
            if options.disturbed:
                has_wait = costs.wait is not None
                learning = disturbed_settings(
                    options.disturbed, options.learners, has_wait=has_wait
                )
                of_cell = _rows(pool, jobs, learning)
                rows += of_cell
                print(f"\n{name}, batch size {batch_size}, model drafter {drafter_name}\n")
                print(disturbed_table_of(of_cell), flush=True)
                write_rows(options.json, map(asdict, rows))
                continue
            trees = {"model": [Setting("model", tree) for tree in MODEL_TREES]}
            of_model = _best(pool, jobs, trees)
            has_wait = costs.wait is not None
            others = settings_of(of_model["model"].tree, options.thresholds, has_wait=has_wait)
            if options.policies:
                others = {name: others[name] for name in (*options.policies, "oracle")}
            chosen = of_model | _best(pool, jobs, others)
            of_cell = beside_oracle(_rows(pool, jobs, {n: [chosen[n]] for n in chosen}))
            rows += of_cell
            print(f"\n{name}, batch size {batch_size}, model drafter {drafter_name}\n")
            print(table_of(of_cell), flush=True)
            if "plain" in chosen:
                print(f"\n{plain_table_of(of_cell)}", flush=True)
            write_rows(options.json, map(asdict, rows))  # what there is, so far
    for name in tables if not options.disturbed else ():
        print(f"\n{name}\n\n{summary_of([row for row in rows if row.costs == name])}")
    return 0


def _tables(paths: Sequence[Path]) -> dict[str, StepCosts]:
    """By the name that rows give them. Raises ValueError if two have the same."""
    tables: dict[str, StepCosts] = {}
    for path in paths:
        if path.stem in tables:
            raise ValueError(f"--costs: rows would call two tables {path.stem}: rename one")
        tables[path.stem] = StepCosts.load(path)
    return tables


def _check_policies(policies: Sequence[str], tables: Mapping[str, StepCosts]) -> None:
    """Raises ValueError, in one line, if a table has nothing that a policy waits for."""
    for name, costs in tables.items():
        if WAITING in policies and costs.wait is None:
            raise ValueError(
                f'"{WAITING}" is "allocate" where nothing is waited for, as under {name}: give '
                "--wait, or leave it out of --policies"
            )


def _rows(
    pool: Workers, jobs: Sequence[Job], settings: Mapping[str, Sequence[Setting]]
) -> list[Row]:
    """Of each file and setting. Raises ValueError if no file has a session to serve."""
    of_files = pool.map(partial(run_job, settings=settings), jobs)
    rows = [row for of_file in of_files for row in of_file]
    if not rows:
        raise ValueError(NOTHING_LEFT)
    return rows


def _best(
    pool: Workers, jobs: Sequence[Job], settings: Mapping[str, Sequence[Setting]]
) -> dict[str, Setting]:
    """Of each name the setting with the greatest speed with the first seed, in the mean over the
    families of the mean of their files relative to the name's first setting."""
    best = {name: of_name[0] for name, of_name in settings.items()}
    several = {name: of_name for name, of_name in settings.items() if len(of_name) > 1}
    if not several:
        return best
    rows = _rows(pool, [replace(job, num_seeds=1) for job in jobs], several)
    for name, of_name in several.items():
        beside: dict[str, list[tuple[str, float]]] = {str(setting): [] for setting in of_name}
        first: dict[str, float] = {}
        for row in rows:
            if row.policy == name:
                speed = row.tokens_per_ms / first.setdefault(row.file, row.tokens_per_ms)
                beside[row.setting].append((row.family, speed))
        speeds = {setting: mean_over_families(beside[str(setting)]) or 0.0 for setting in of_name}
        best[name] = max(speeds, key=speeds.__getitem__)
    return best


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("replay", "Policies under tables of costs.")
    add_texts(parser)
    parser.add_argument("--costs", type=Path, nargs="+", required=True)
    add_cache_mode(parser, default="votes")
    parser.add_argument("--batch-sizes", type=count, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--strengths", choices=STRENGTHS, nargs="+", default=["usual"])
    kinds = [kind for kind, ratio in ODDS_RATIOS.items() if ratio is not None]
    parser.add_argument("--kinds", choices=kinds, nargs="+", default=kinds)
    parser.add_argument("--thresholds", type=not_negative, nargs="+", default=[1, 2, 3, 4.5])
    parser.add_argument(
        "--size-effect",
        type=not_negative,
        default=SIZE_EFFECT,
        help="of the simulated tree, in log odds for each doubling of its nodes; `allocate` "
        "assumes %(default)s",
    )
    parser.add_argument(
        "--spread",
        type=not_negative,
        default=0.0,
        help="between sessions, of what the simulated drafter has right: a standard deviation in "
        "log odds (default: %(default)g)",
    )
    parser.add_argument(
        "--tokens",
        type=count,
        default=4_000,
        help="to measure for each file, policy and seed; for fewer than 2048 a single request is "
        "taken up at fewer places than eight (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens-per-request",
        type=count,
        default=128,
        help="but no fewer than so many for each of the requests at a time (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=count, default=1, help="(default: %(default)s)")
    parser.add_argument(
        "--postpone-extend",
        choices=get_args(PostponeExtend),
        help="as --hvd-postpone-extend (default: plain where steps run ahead, else never)",
    )
    parser.add_argument(
        "--wait",
        type=not_negative,
        default=0.0,
        help="milliseconds for which the device waits for the host before a step that is planned "
        "from the tokens of the last; the table's own if it has some (default: none)",
    )
    parser.add_argument(
        "--own-pace",
        type=not_negative,
        default=OWN_PACE,
        help="how far `allocate` weighs tokens and time by the step itself, from 0, by the pace of "
        f"the latest steps, to 1 (default: {OWN_PACE})",
    )
    parser.add_argument(
        "--disturbed",
        choices=DISTURBANCES,
        nargs="+",
        help="instead of the policies: `allocate` on servers that differ so from the table and "
        "learn from their steps, over `allocate` with the right table",
    )
    parser.add_argument("--learners", choices=LEARNERS, nargs="+", default=list(LEARNERS))
    parser.add_argument("--files", nargs="+", help="only these recordings, by name")
    known = settings_of(MODEL_TREES[-1], [], has_wait=True)
    policies = [name for name in known if name != "oracle"]
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=policies,
        help="rows beside those of model and oracle (default: all)",
    )
    parser.add_argument("--processes", type=count, default=2)
    add_json(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(main)
