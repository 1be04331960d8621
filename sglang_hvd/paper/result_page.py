"""Writes results of `benchmarks.paper` as one HTML page that needs no network."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from jinja2 import Environment
from markupsafe import Markup

from sglang_hvd.paper.paper_tables import Column, Quoted, RunData, Table, runs, speedups
from sglang_hvd.paper.results import Result
from sglang_hvd.paper.rounds import Cell, Missing
from sglang_hvd.view.pages import page_environment


@dataclass(frozen=True, slots=True)
class Part:
    """A section of the page: what it shows, in words, plots and tables."""

    topic: str
    summary: str
    text: str
    plots: tuple[str, ...]
    drawn: tuple[Markup, ...]
    tables: tuple[Table, ...]


def write_page(results: Sequence[Result], *, command: str) -> str:
    """The page of the runs of one model. `command` is the command line that made it."""
    parts = []
    for result in results:
        run = RunData.of(result)
        parts += [
            Part("Speedup", "Speedup", "", (), (), (speedups(run),)),
            Part("All", "All", "", (), (), (runs(run),)),
        ]
    return (
        _environment()
        .get_template("result.html")
        .render(title=results[0].model, sentences=[], parts=parts, command=command)
    )


def _environment() -> Environment:
    environment = page_environment("sglang_hvd.paper")
    environment.filters |= {"cell": _cell, "groups": _groups}
    return environment


def _cell(cell: Cell | Quoted, column: Column) -> Markup:
    """The cell of a table, with the spread of its rounds where there are several."""

    def text(value: float) -> str:
        return f"{column.scale * value:.{column.decimals}f}"

    if isinstance(cell, Missing):
        return Markup('<td class="missing">{}</td>').format(cell.why)
    if isinstance(cell, Quoted):
        return Markup('<td class="paper">{}</td>').format(f"{cell.value:.{column.decimals}f}")
    notes = [f"{text(cell.low)} to {text(cell.high)}"] if cell.low < cell.high else []
    notes += [cell.note] if cell.note else []
    spread = Markup("").join(Markup('<span class="spread">{}</span>').format(n) for n in notes)
    return Markup("<td>{}{}</td>").format(text(cell.value), spread)


def _groups(table: Table) -> list[tuple[str, int]]:
    """The headings above the columns, with the number of columns that each spans."""
    found = groupby(table.columns, key=lambda column: column.group)
    return [("", len(table.heads)), *((name, len(list(columns))) for name, columns in found)]
