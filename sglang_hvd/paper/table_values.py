"""Values that the tables of a result are made of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sglang_hvd.paper import published
from sglang_hvd.paper.results import Result
from sglang_hvd.paper.rounds import (
    NOT_RUN,
    NOT_YET_RUN,
    Cell,
    Load,
    Measured,
    Missing,
    Rounds,
    over_rounds,
)

METHODS = (published.METHOD, "hvd")

# What the paper's modes and ours are called where a result does not say so.
_LABELS = {
    "greedy": "Greedy",
    "eagle3": "EAGLE3",
    "suffix": "SuffixDecoding",
    "frequency": "Frequency hybrid",
    "hvd-paper": "HVD (paper)",
    "hvd": "HVD (allocate)",
}

# A figure that the mode or the data cannot have, such as the accepted tokens of greedy decoding.
NONE = Missing("\u2013")

_UNMEASURED = (NOT_RUN, NOT_YET_RUN)


@dataclass(frozen=True, slots=True)
class Quoted:
    """A figure of the paper."""

    value: float


@dataclass(frozen=True, slots=True)
class Column:
    """A column of figures.

    group: what several columns have in common; adjacent columns of one group share a heading.
    decimals: digits after the point.
    scale: what a measured figure is multiplied by: 100 shows a share in percent.
    """

    head: str
    group: str = ""
    decimals: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row, or the heading of those that follow if it has no cells.

    marks: what the reader must know of its figures.
    """

    name: str
    cells: tuple[Cell | Quoted, ...] = ()
    marks: tuple[str, ...] = ()
    is_mean: bool = False

    @property
    def is_unmeasured(self) -> bool:
        """Whether the run could have measured this row, but did not."""
        return any(cell in _UNMEASURED for cell in self.cells) and not any(
            isinstance(cell, Measured) for cell in self.cells
        )


@dataclass(frozen=True, slots=True)
class Table:
    """A table. name: that of the paper's table or figure. head: what a row is about."""

    name: str
    caption: str
    head: str
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]

    def split(self) -> tuple["Table", "Table"]:
        """The table, and its rows of which the run measured nothing. Headings go with both."""
        return self._with(is_unmeasured=False), self._with(is_unmeasured=True)

    def _with(self, *, is_unmeasured: bool) -> "Table":
        rows = [row for row in self.rows if not row.cells or row.is_unmeasured == is_unmeasured]
        # A heading stays if a row follows it.
        followed = pairwise((*rows, TableRow("")))
        kept = [row for row, after in followed if row.cells or after.cells]
        return replace(self, rows=tuple(kept))


@dataclass(frozen=True, slots=True)
class RunData:
    """A result, and what all its tables need to know of it.

    number: tells runs of like machines apart; None if no two machines of the page are alike.
    """

    result: Result
    rounds: Rounds
    number: int | None = None

    @classmethod
    def of(cls, result: Result) -> "RunData":
        return cls(result, Rounds(result))

    @classmethod
    def all_of(cls, results: Sequence[Result]) -> list["RunData"]:
        """The runs of one page."""
        runs = list(map(cls.of, results))
        if len({run.machine for run in runs}) == len(runs):
            return runs
        return [replace(run, number=number) for number, run in enumerate(runs, start=1)]

    @property
    def is_of_paper(self) -> bool:
        """Whether the paper has this model."""
        return self.result.model in published.MODELS

    @property
    def paper_model(self) -> str:
        """The model of the paper whose figures stand next to the run's: its own, if it has one."""
        return self.result.model if self.is_of_paper else next(iter(published.MODELS))

    @property
    def machine(self) -> str:
        machine = self.result.machine
        name = machine.gpu or f"{machine.cpu}, {machine.num_cores} cores"
        if machine.gpu is not None and machine.num_gpus != 1:
            name = f"{machine.num_gpus} {name}"
        return name if self.number is None else f"{name} (run {self.number})"

    @property
    def modes(self) -> list[str]:
        """The paper's and ours, whether they were run or not, then the others of the run."""
        known = (*published.BASELINES, *METHODS)
        return list(dict.fromkeys((*known, *(mode.name for mode in self.result.modes))))

    @property
    def data_sets(self) -> list[str]:
        return [one.name for one in self.result.data_sets]

    @property
    def methods(self) -> tuple[str, ...]:
        """Those of METHODS that the run has figures of; both if it has none."""
        found = {one.mode for one in self.result.measurements}
        return tuple(method for method in METHODS if method in found) or METHODS

    def loads(self) -> list[Load]:
        """The loads of the run, those of table 4 alone left out."""
        return [load for load in self.rounds.loads() if load.template == self.rounds.alone.template]

    def label(self, mode: str) -> str:
        known = next((one for one in self.result.modes if one.name == mode), None)
        return _LABELS[mode] if known is None else known.label

    def families(self) -> dict[str, list[str]]:
        """Data sets by family: the paper's, whether they were run or not, then the run's own."""
        found: dict[str, list[str]] = {}
        for name, paper in published.DATA_SETS.items():
            found.setdefault(paper.family, []).append(name)
        for one in self.result.data_sets:
            if one.name not in published.DATA_SETS:
                found.setdefault(one.family, []).append(one.name)
        return found

    def run_families(self) -> dict[str, list[str]]:
        """Data sets of the run by family."""
        found: dict[str, list[str]] = {}
        for family, names in self.families().items():
            if run := [name for name in names if name in self.data_sets]:
                found[family] = run
        return found

    def marks(self, cells: Iterable[Cell | Quoted], data_sets: Iterable[str]) -> tuple[str, ...]:
        """What is to be known of cells with figures from these data sets."""
        if not any(isinstance(cell, Measured) for cell in cells):
            return ()
        wanted = set(data_sets)
        are_samples = [one.is_sample for one in self.result.data_sets if one.name in wanted]
        samples = "sample" if all(are_samples) else "some samples"
        return (
            *((samples,) if any(are_samples) else ()),
            *(("no GPU",) if self.result.machine.gpu is None else ()),
        )


def title_of(data_set: str) -> str:
    """What tables call a data set."""
    paper = published.DATA_SETS.get(data_set)
    return data_set if paper is None else paper.title


def counted(value: float) -> Measured:
    """A figure that is the same in every round."""
    return over_rounds({0: value})


def quoted(*values: float | None) -> list[Cell | Quoted]:
    """Figures of the paper; None is a dash there."""
    return [NONE if value is None else Quoted(value) for value in values]
