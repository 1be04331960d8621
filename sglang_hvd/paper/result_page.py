"""Writes results of `benchmarks.paper` as one HTML page that needs no network."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import PurePath

from jinja2 import Environment
from markupsafe import Markup

from sglang_hvd.paper import published
from sglang_hvd.paper.result_parts import main_method, noted, pace, parts_of
from sglang_hvd.paper.results import Result
from sglang_hvd.paper.rounds import Cell, Measured, Missing
from sglang_hvd.paper.speed_tables import mean_over
from sglang_hvd.paper.table_values import Column, Quoted, RunData, Table, title_of
from sglang_hvd.view.pages import page_environment


def write_page(results: Sequence[Result], *, command: str) -> str:
    """The page of the runs of one model. `command` is the command line that made it."""
    runs = RunData.all_of(results)
    return (
        _environment()
        .get_template("result.html")
        .render(
            runs=runs,
            sentences=sentences(runs),
            parts=parts_of(runs),
            command=command,
            title_of=title_of,
        )
    )


def sentences(runs: Sequence[RunData]) -> list[str]:
    """Sentences: what the runs show, and what it is worth."""
    first = runs[0]
    if len(runs) == 1:
        return [f"{pace(first)}{_over(first)}.", _worth(first)]
    method = main_method(first)
    cells = [(run, mean_over(run, method, "eagle3")) for run in runs]
    known = [(run, cell) for run, cell in cells if isinstance(cell, Measured)]
    times = [
        f"{cell.value:.2f} times as fast as EAGLE3 on {run.machine}{noted(run, cell)}"
        for run, cell in known
    ]
    said = f"{first.label(method)} decodes {' and '.join(times)}."
    if not times:
        said = f"No run says how fast {first.label(method)} is."
    warnings, of_first = _warnings(runs), _settings(first)
    differing = [
        name
        for name, value in of_first.items()
        if any(_settings(run)[name] != value for run in runs)
    ]
    if differing:
        differ = f"The runs differ in more than the machine: {', '.join(differing)}."
        return [said, differ, *warnings]
    return [said, "All runs have the same prompts, seed, limits, flags and versions.", *warnings]


def _warnings(runs: Sequence[RunData]) -> list[str]:
    """What the figures of several runs lack: once if it is the same of all."""
    lacks = [_lack(run) for run in runs]
    if len(set(lacks)) == 1:
        return [lacks[0]] if lacks[0] else []
    return [f"{run.machine}: {lack}" for run, lack in zip(runs, lacks, strict=True) if lack]


def _settings(run: RunData) -> Mapping[str, object]:
    """What has to be the same in runs that are compared."""
    result = run.result
    return {
        **{
            name.replace("_", " "): getattr(result, name)
            for name in ("drafter", "seed", "max_new_tokens", "shared_flags", "versions")
        },
        # A predictor or a configuration may lie in another folder.
        "modes": {mode.name: [PurePath(flag).name for flag in mode.flags] for mode in result.modes},
        "template": run.rounds.alone.template,
        "data sets": {one.name: one for one in result.data_sets},
    }


def _over(run: RunData) -> str:
    """What the mean is of, in brackets."""
    means = [mean_over(run, main_method(run), base) for base in ("greedy", "eagle3")]
    known = [one for one in means if isinstance(one, Measured)]
    if not known:
        return ""
    number = known[0].note or str(len(run.data_sets))
    return " (one data set)" if number == "1" else f" (geometric mean of {number} data sets)"


def _worth(run: RunData) -> str:
    """What a run's figures are worth."""
    if lack := _lack(run):
        return lack
    if not run.result.is_complete:
        return f"The run on {run.machine} is not complete, so figures are missing."
    number = sum(name in published.DATA_SETS for name in run.data_sets)
    return (
        f"It ran on {run.machine} with {number} of the paper's {len(published.DATA_SETS)} data "
        "sets, one request at a time."
    )


def _lack(run: RunData) -> str:
    """Why a run's figures say little of performance; empty if they do."""
    result = run.result
    lacks = []
    if result.machine.gpu is None:
        lacks.append("no GPU was used")
    num_samples = sum(one.is_sample for one in result.data_sets)
    if num_samples:
        lacks.append(f"{num_samples} of {len(result.data_sets)} data sets are made-up samples")
    if not lacks:
        return ""
    told = " and ".join(lacks)
    broken = "" if result.is_complete else " The run is not complete."
    return (
        f"{told[0].upper()}{told[1:]}. The numbers show that the pipeline works. They do not show "
        f"performance.{broken}"
    )


def _environment() -> Environment:
    environment = page_environment("sglang_hvd.paper")
    environment.filters |= {"cell": _cell, "groups": _groups, "identical": _identical}
    return environment


def _cell(cell: Cell | Quoted, column: Column) -> Markup:
    """The cell of a table, with the spread of its rounds where there are several."""

    def text(value: float) -> str:
        return f"{column.scale * value:.{column.decimals}f}"

    if isinstance(cell, Missing):
        return Markup('<td class="missing">{}</td>').format(cell.why)
    if isinstance(cell, Quoted):
        return Markup('<td class="paper">{}</td>').format(f"{cell.value:.{column.decimals}f}")
    low, high = text(cell.low), text(cell.high)
    notes = [f"{low} to {high}"] if low != high else []
    notes += [note for note in (cell.note, cell.rounds_note) if note]
    spread = Markup("").join(Markup('<span class="spread">{}</span>').format(n) for n in notes)
    return Markup("<td>{}{}</td>").format(text(cell.value), spread)


def _groups(table: Table) -> list[tuple[str, int]]:
    """The headings above the columns, with the number of columns that each spans."""
    found = groupby(table.columns, key=lambda column: column.group)
    groups = [("", 1), *((name, len(list(columns))) for name, columns in found)]
    return groups if any(name for name, _ in groups) else []


def _identical(run: RunData) -> str:
    """How many replies were those of greedy decoding."""
    compared = [one for one in run.result.measurements if one.is_identical is not None]
    if not compared:
        return "not compared"
    differing = sorted({run.label(one.mode) for one in compared if not one.is_identical})
    number = sum(bool(one.is_identical) for one in compared)
    said = f"in {number} of {len(compared)} measurements every reply is that of greedy decoding"
    return f"{said}; others of {', '.join(differing)}" if differing else said
