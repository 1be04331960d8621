"""Compares the policies on recorded generations, by tables of costs and at several batch sizes.

    python -m benchmarks.replay --traces DIR --tokenizer FILE --costs FILE... [--json FILE]

Sessions that the shipped predictor was trained on fill the shared cache and are not counted. The
model drafter is simulated (sglang_hvd/replay/core/model_drafter.py). A step is as wide as its
drafts need.

Each policy but `allocate` runs with several settings. Its rows are those of the setting that is
best over all files at that batch size, with the first seed. `model` chooses the size of the model
drafter's tree; the other policies use that tree and choose the widest verification, and "payoff
fixed" also chooses its threshold.

`allocate` chooses all of that itself, up to 64 nodes. Its variants:

- "allocate, width 32": up to 32 nodes, a server's default for more than two requests.
- "allocate, one tree": it cannot choose the number of steps, like a server without memory for
  drafts of fewer steps. It has the tree of `model`, or a smaller one.
- "allocate, chains": cache drafts do not branch.
- "oracle", "oracle, one tree": they know the accepted length of every draft.
- "oracle, right nodes": it also verifies only the right nodes of cache drafts.
- "knows cache drafts", "knows model drafts": they know the accepted lengths of these drafts only.

Replay counts more nodes for a draft of few steps than a server would, to the disadvantage of
`allocate`.

A cell is a batch size and a model drafter. For each cell two tables are printed: the policies with
their settings and their regret to the oracle, and their speeds relative to plain serving, by family
and for the slowest file. The last tables, one for each of --costs, compare the cells.

With --wait every step waits so long for the host, except the steps of `plain` and those of
`allocate` that run ahead. "allocate, waits" never runs ahead.

With `--disturbed` there are no policies: `allocate` runs on servers that differ from the table
(disturbed.py) and corrects it by their steps. Its speeds are over that of `allocate` with the right
table, on a server that does not differ.

With several seeds everything is served several times, each time with another draw of the model
drafter and from other places of the texts. Rows combine all seeds. With the default of --tokens,
each seed starts at eight places of the texts or more.
"""

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import get_args

from tqdm import tqdm

from benchmarks.command import parser_of, run, write_rows
from benchmarks.replay.disturbed import DISTURBANCES
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
from sglang_hvd.commands.arguments import add_cache_mode, add_json, add_texts, count, not_negative
from sglang_hvd.config import PostponeExtend
from sglang_hvd.costs import StepCosts
from sglang_hvd.payoff import SIZE_EFFECT
from sglang_hvd.replay.core.model_drafter import ODDS_RATIOS, STRENGTHS, ModelDrafter
from sglang_hvd.replay.core.recordings import (
    NOTHING_LEFT,
    Recording,
    TraceTokenizer,
    find_recordings,
    mean_over_families,
)
from sglang_hvd.replay.core.workers import workers


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
    documents = _documents(recordings, options)
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
                    documents,
                )
                for recording in recordings
            ]
            title = f"\n{name}, batch size {batch_size}, model drafter {drafter_name}\n"
            has_wait = costs.wait is not None
            if options.disturbed:
                learning = disturbed_settings(options.disturbed, has_wait=has_wait)
                rows += (of_cell := _rows(pool, jobs, learning))
                print(f"{title}\n{disturbed_table_of(of_cell)}", flush=True)
                write_rows(options.json, map(asdict, rows))
                continue
            trees = {"model": [Setting("model", tree) for tree in MODEL_TREES]}
            of_model = _best(pool, jobs, trees)
            others = settings_of(of_model["model"].tree, options.thresholds, has_wait=has_wait)
            if options.policies:
                others = {name: others[name] for name in (*options.policies, "oracle")}
            chosen = of_model | _best(pool, jobs, others)
            of_cell = beside_oracle(_rows(pool, jobs, {n: [chosen[n]] for n in chosen}))
            rows += of_cell
            print(f"{title}\n{table_of(of_cell)}", flush=True)
            if "plain" in chosen:
                print(f"\n{plain_table_of(of_cell)}", flush=True)
            write_rows(options.json, map(asdict, rows))  # the rows so far
    for name in tables if not options.disturbed else ():
        print(f"\n{name}\n\n{summary_of([row for row in rows if row.costs == name])}")
    return 0


def _documents(recordings: Sequence[Recording], options: argparse.Namespace) -> Recording | None:
    """What servers learn from before their contexts change. Raises ValueError if it is needed and
    not named, or not there."""
    if not any(DISTURBANCES[name].follows_documents for name in options.disturbed or ()):
        return None
    names = [recording.name for recording in recordings]
    if options.documents not in names:
        raise ValueError(
            f"--documents: give one of the recordings, {', '.join(names)}, got {options.documents}"
        )
    return recordings[names.index(options.documents)]


def _tables(paths: Sequence[Path]) -> dict[str, StepCosts]:
    """Cost tables by their names in rows. Raises ValueError if two have the same name."""
    tables: dict[str, StepCosts] = {}
    for path in paths:
        if path.stem in tables:
            raise ValueError(f"--costs: rows would call two tables {path.stem}: rename one of them")
        tables[path.stem] = StepCosts.load(path)
    return tables


def _check_policies(policies: Sequence[str], tables: Mapping[str, StepCosts]) -> None:
    """Raises ValueError, in one line, if a policy needs a wait and a table has none."""
    for name, costs in tables.items():
        if WAITING in policies and costs.wait is None:
            raise ValueError(
                f'"{WAITING}" equals "allocate" with a table that has no wait, as {name}: give '
                "--wait, or leave it out of --policies"
            )


def _rows(
    pool: Executor, jobs: Sequence[Job], settings: Mapping[str, Sequence[Setting]]
) -> list[Row]:
    """A row for each file and setting. Raises ValueError if no file has a session to serve."""
    of_files = pool.map(partial(run_job, settings=settings), jobs)
    rows = [row for of_file in of_files for row in of_file]
    if not rows:
        raise ValueError(NOTHING_LEFT)
    return rows


def _best(
    pool: Executor, jobs: Sequence[Job], settings: Mapping[str, Sequence[Setting]]
) -> dict[str, Setting]:
    """The fastest setting of each name, with the first seed.

    A setting's speed is its mean over the families of their mean over files, relative to the name's
    first setting.
    """
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
    parser = parser_of("replay", "Compare policies by tables of costs.")
    add_texts(parser)
    parser.add_argument(
        "--costs",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="tables of step costs (see configs/costs)",
    )
    add_cache_mode(parser, default="votes")
    parser.add_argument(
        "--batch-sizes",
        type=count,
        nargs="+",
        default=[1, 8, 32, 64],
        metavar="N",
        help="(default: 1 8 32 64)",
    )
    parser.add_argument(
        "--strengths",
        choices=STRENGTHS,
        nargs="+",
        default=["usual"],
        help="how many tokens of the simulated model drafter are accepted (default: usual)",
    )
    kinds = [kind for kind, ratio in ODDS_RATIOS.items() if ratio is not None]
    parser.add_argument(
        "--kinds",
        choices=kinds,
        nargs="+",
        default=kinds,
        help="whether the simulated model drafter is better where the cache is right (default: "
        "both kinds)",
    )
    parser.add_argument(
        "--thresholds",
        type=not_negative,
        nargs="+",
        default=[1, 2, 3, 4.5],
        metavar="N",
        help='thresholds that "payoff fixed" chooses from (default: 1 2 3 4.5)',
    )
    parser.add_argument(
        "--size-effect",
        type=not_negative,
        default=SIZE_EFFECT,
        help="effect of the simulated tree's size on a token being right, in log odds for each "
        "doubling of the nodes; `allocate` assumes %(default)s",
    )
    parser.add_argument(
        "--spread",
        type=not_negative,
        default=0.0,
        help="standard deviation between sessions of a simulated token being right, in log odds "
        "(default: %(default)g)",
    )
    parser.add_argument(
        "--tokens",
        type=count,
        default=4_000,
        help="tokens to measure for each file, policy and seed; with fewer than 2048, batch size 1 "
        "starts at fewer than eight places (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens-per-request",
        type=count,
        default=128,
        help="minimum of tokens for each request of the batch (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=count, default=1, help="draws of the model drafter (default: %(default)s)"
    )
    parser.add_argument(
        "--postpone-extend",
        choices=get_args(PostponeExtend),
        help="as the setting postpone_extend (default: plain if steps run ahead, else never)",
    )
    parser.add_argument(
        "--wait",
        type=not_negative,
        default=0.0,
        help="milliseconds that the device waits for the host before a step that needs the tokens "
        "of the step before it (default: the table's own wait, if it has one)",
    )
    parser.add_argument(
        "--disturbed",
        choices=DISTURBANCES,
        nargs="+",
        help="instead of the policies: `allocate` on servers that differ from the table in these "
        "ways",
    )
    parser.add_argument(
        "--documents",
        metavar="NAME",
        help="the recording that a server learns from before its contexts change",
    )
    known = settings_of(MODEL_TREES[-1], [], has_wait=True)
    policies = [name for name in known if name != "oracle"]
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=policies,
        metavar="POLICY",
        help=f"policies to compare with model and oracle: {'; '.join(policies)} (default: all)",
    )
    parser.add_argument(
        "--processes",
        type=count,
        default=2,
        help="recordings that are replayed at a time (default: %(default)s)",
    )
    add_json(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(main)
