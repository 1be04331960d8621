"""Compares runs of one model on several machines (figure 5)."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import parser_of
from sglang_hvd.paper.results import Result, read_result
from sglang_hvd.paper.rounds import Load, Missing, Rounds, over_rounds
from sglang_hvd.replay.training.tables import markdown_table


def join(arguments: Sequence[str]) -> int:
    """The subcommand: prints a table of the runs' modes side by side."""
    parser = parser_of("paper join", "Compare runs of one model on several machines.")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    options = parser.parse_args(arguments)
    rows = side_by_side([read_result(path) for path in options.results])
    columns = {
        "machine": "machine",
        "mode": "mode",
        "num_at_once": "at once",
        "tokens_per_s": "tokens/s",
        "speedup": "x EAGLE3",
        "cycles_per_1k": "cycles per 1K",
    }
    print(markdown_table(columns, rows, num_labels=2, digits=2))
    return 0


def side_by_side(results: Sequence[Result]) -> list[dict[str, object]]:
    """A row for each mode, concurrency and run, over the data sets that all runs have measured.

    A data set of another revision, or with other prompts, is another data set. Figures are those of
    the report page: throughput and cycles of all data sets together, the geometric mean of the
    speedups over EAGLE3 where a run has both in one round, medians over each run's rounds. A figure
    without a round is None.

    Raises ValueError if the runs are of different models or settings, or have nothing in common.
    """
    runs = [Rounds(result) for result in results]
    settings = {
        name: {str(getattr(result, name)) for result in results}
        for name in ("model", "max_new_tokens", "seed")
    }
    settings["template"] = {run.alone.template for run in runs if run.result.measurements}
    for name, values in settings.items():
        if len(values) > 1:
            told = ", ".join(sorted(values))
            raise ValueError(f"runs of different {name} cannot be compared: {told}")
    machines = [result.machine.gpu or result.machine.cpu for result in results]
    if len(set(machines)) < len(machines):
        machines = [f"{name} (run {number})" for number, name in enumerate(machines, start=1)]
    rows: list[dict[str, object]] = []
    for load in _loads(runs):
        of_base = _data_sets(runs, "eagle3", load)
        for mode in results[0].modes:
            names = _data_sets(runs, mode.name, load)
            compared = [name for name in names if name in of_base]
            if not names:
                continue
            for machine, run in zip(machines, runs, strict=True):
                totals = run.totals(mode.name, names, load)
                found = {} if isinstance(totals, Missing) else totals
                speeds = {number: one.throughput for number, one in found.items()}
                cycles = {number: one.cycles_per_1k for number, one in found.items()}
                speedup = run.mean_speedup(mode.name, "eagle3", compared, load)
                rows.append(
                    {
                        "machine": machine,
                        "mode": mode.label,
                        "num_at_once": load.concurrency,
                        "tokens_per_s": over_rounds(speeds).value if found else None,
                        "speedup": None if isinstance(speedup, Missing) else speedup.value,
                        "cycles_per_1k": over_rounds(cycles).value if found else None,
                    }
                )
    if not rows:
        raise ValueError("the runs have no measurement in common")
    return rows


def _loads(runs: Sequence[Rounds]) -> list[Load]:
    """The closed loops of all runs. Those without a chat template are left out, unless there are no
    others."""
    of_runs = [
        {load for load in run.loads() if load.rate is None and load.template == run.alone.template}
        for run in runs
    ]
    return sorted(set.intersection(*of_runs), key=lambda load: load.concurrency)


def _data_sets(runs: Sequence[Rounds], mode: str, load: Load) -> list[str]:
    """The data sets that all runs have of a mode, with the same prompts."""
    of_runs = [
        {
            (one.name, one.source, one.num_measured)
            for one in run.result.data_sets
            if not isinstance(run.of(mode, one.name, load), Missing)
        }
        for run in runs
    ]
    return sorted(name for name, _, _ in set.intersection(*of_runs))
