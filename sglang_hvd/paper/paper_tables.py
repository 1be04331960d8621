"""The paper's tables for a result, with the paper's own figures beside them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sglang_hvd.paper import published
from sglang_hvd.paper.results import Mode, Result
from sglang_hvd.paper.rounds import (
    NONE,
    Cell,
    Measured,
    Missing,
    Rounds,
    Total,
    over_rounds,
)

METHODS = (published.METHOD, "hvd")


@dataclass(frozen=True, slots=True)
class Quoted:
    """A figure of the paper."""

    value: float


@dataclass(frozen=True, slots=True)
class Column:
    """A column of figures.

    group: what several columns have in common; adjacent columns of one group share a heading.
    decimals: digits after the point.
    scale: what a figure is multiplied by: 100 shows a share in percent.
    """

    head: str
    group: str = ""
    decimals: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class TableRow:
    """words: what the row is about. marks: what the reader must know of its figures."""

    words: tuple[str, ...]
    cells: tuple[Cell | Quoted, ...]
    marks: tuple[str, ...] = ()
    is_mean: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    caption: str
    heads: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]


@dataclass(frozen=True, slots=True)
class RunData:
    """A result and what all its tables share.

    paper_model: the model of the paper whose figures stand beside: the run's own, otherwise the
        first one.
    """

    result: Result
    rounds: Rounds

    @classmethod
    def of(cls, result: Result) -> "RunData":
        return cls(result, Rounds(result))

    @property
    def paper_model(self) -> str:
        return self.result.model if self.result.model in published.MODELS else "qwen3-8b"

    @property
    def paper_group(self) -> str:
        return f"paper: {published.MODELS[self.paper_model]}"

    @property
    def num_gpus(self) -> int:
        return 0 if self.result.machine.gpu is None else self.result.machine.num_gpus

    def mode(self, name: str) -> Mode | None:
        return next((one for one in self.result.modes if one.name == name), None)

    def label(self, name: str) -> str:
        mode = self.mode(name)
        return LABELS.get(name, name) if mode is None else mode.label

    def marks(self, data_sets: Iterable[str], *, is_measured: bool = True) -> tuple[str, ...]:
        """What is to be known of figures from these data sets."""
        if not is_measured:
            return ()
        wanted = set(data_sets)
        parts = [one.is_sample for one in self.result.data_sets if one.name in wanted]
        samples = "sample" if all(parts) else "some samples"
        return (*((samples,) if any(parts) else ()), *(() if self.num_gpus else ("no GPU",)))

    def families(self) -> dict[str, list[str]]:
        """Data sets by family: the paper's, whether they were run or not, then the run's own."""
        found: dict[str, list[str]] = {}
        for name, paper in published.DATA_SETS.items():
            found.setdefault(paper.family, []).append(name)
        for one in self.result.data_sets:
            if one.name not in published.DATA_SETS:
                found.setdefault(one.family, []).append(one.name)
        return found

    def measured(self) -> list[str]:
        return [one.name for one in self.result.data_sets]


# What modes are called where a result does not say so.
LABELS = {
    "greedy": "Greedy",
    "eagle3": "EAGLE3",
    "suffix": "SuffixDecoding",
    "frequency": "Frequency hybrid",
    "hvd-paper": "HVD (paper)",
    "hvd": "HVD (allocate)",
    "eagle3-adaptive": "EAGLE3, adaptive",
    "ngram": "NGRAM",
}


def title_of(data_set: str) -> str:
    paper = published.DATA_SETS.get(data_set)
    return data_set if paper is None else paper.title


def speedups(run: RunData) -> Table:
    """Table 1."""
    columns = [
        Column(run.label(base), f"{run.label(method)} over", 2)
        for method in METHODS
        for base in published.BASELINES
    ]
    columns += [
        Column(run.label(base), f"{run.paper_group}, over", 2) for base in published.BASELINES
    ]
    columns.append(Column("noise, %", "", 1, 100.0))
    index = list(published.MODELS).index(run.paper_model)
    rows = []
    for family, names in run.families().items():
        for name in names:
            paper = published.DATA_SETS.get(name)
            quoted = [NONE] * 4 if paper is None else list(map(Quoted, paper.speedups[index]))
            cells = [
                run.rounds.speedup(method, base, name)
                for method in METHODS
                for base in published.BASELINES
            ]
            rows.append(
                TableRow(
                    (title_of(name), family),
                    (*cells, *quoted, run.rounds.noise([name])),
                    run.marks([name], is_measured=_is_measured(cells)),
                )
            )
        if len(names) > 1:
            rows.append(_mean_row(run, "geometric mean", family, names))
    everything = run.measured()
    rows.append(_mean_row(run, "Geometric mean", "all data sets", everything))
    rows.append(
        _mean_row(
            run,
            "Arithmetic mean, as in the paper",
            "all data sets",
            everything,
            is_geometric=False,
            quoted=published.AVERAGES[index],
        )
    )
    return Table(
        "Table 1",
        "Speedup: tokens per second over those of another way of decoding, on the same prompts, "
        "one request at a time. Medians over the rounds, with the slowest and the fastest round.",
        ("data set", "family"),
        tuple(columns),
        tuple(rows),
    )


def _mean_row(
    run: RunData,
    name: str,
    family: str,
    data_sets: Sequence[str],
    *,
    is_geometric: bool = True,
    quoted: Sequence[float] = (),
) -> TableRow:
    measured = [one for one in run.measured() if one in data_sets]
    cells = [
        run.rounds.mean_speedup(method, base, measured, is_geometric=is_geometric)
        for method in METHODS
        for base in published.BASELINES
    ]
    return TableRow(
        (name, family),
        (
            *cells,
            *(map(Quoted, quoted) if quoted else [NONE] * len(published.BASELINES)),
            run.rounds.noise(measured),
        ),
        run.marks(measured, is_measured=_is_measured(cells)),
        is_mean=True,
    )


def _is_measured(cells: Iterable[Cell | Quoted]) -> bool:
    return any(isinstance(cell, Measured) for cell in cells)


def runs(run: RunData) -> Table:
    """Tables 11 to 13."""
    paper = published.RUNS[run.paper_model]
    data_sets = run.rounds.data_sets((*published.BASELINES, *METHODS))
    columns = [
        *(Column("tokens/s", "this run"), Column("cycles per 1K", "this run")),
        *(Column("accepted per cycle", "this run", 2), Column("cache, %", "this run", 1, 100)),
        *(Column("EAGLE3, %", "this run", 1, 100), Column("both, %", "this run", 1, 100)),
        *(Column("tokens/s", run.paper_group), Column("cycles per 1K", run.paper_group)),
        *(Column("accepted per cycle", run.paper_group, 2), Column("cache, %", run.paper_group)),
        Column("EAGLE3, %", run.paper_group),
    ]
    names = list(dict.fromkeys((*published.RUNS[run.paper_model], *_names(run.result))))
    rows = []
    for name in names:
        cells = run_cells(run, name, data_sets)
        quoted: list[Cell | Quoted] = [NONE] * 5
        if (known := paper.get(name)) is not None:
            figures = (
                *(known.throughput, known.cycles, known.accepted),
                *(known.cache, known.eagle3),
            )
            quoted = [NONE if figure is None else Quoted(figure) for figure in figures]
        rows.append(
            TableRow(
                (run.label(name),),
                (*cells, *quoted),
                run.marks(data_sets, is_measured=_is_measured(cells)),
            )
        )
    number = 11 + list(published.MODELS).index(run.paper_model)
    return Table(
        f"Table {number}",
        f"All data sets together, one request at a time: {len(data_sets)} of the run, those that "
        "each way of decoding has. A cycle verifies a draft of the cache, of EAGLE3, of both or "
        "none.",
        ("way of decoding",),
        tuple(columns),
        tuple(rows),
    )


def run_cells(run: RunData, mode: str, data_sets: Sequence[str]) -> list[Cell]:
    """Throughput, cycles per 1000 tokens, accepted per cycle, and shares of the drafts' sources."""
    found = run.rounds.totals(mode, data_sets)
    return [
        figure(found, lambda total: total.throughput),
        figure(found, lambda total: total.cycles_per_1k),
        figure(found, lambda total: total.mean_accepted),
        figure(found, lambda total: total.share("cache")),
        figure(found, lambda total: total.share("model")),
        figure(found, lambda total: total.share("both")),
    ]


def figure(found: dict[int, Total] | Missing, of: Callable[[Total], float | None]) -> Cell:
    """A figure of each round's total, as its median and spread."""
    if isinstance(found, Missing):
        return found
    values = {number: of(total) for number, total in found.items()}
    known = {number: value for number, value in values.items() if value is not None}
    return over_rounds(known) if known else NONE


def _names(result: Result) -> list[str]:
    return [mode.name for mode in result.modes]
