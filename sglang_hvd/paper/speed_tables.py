"""How fast a run decodes: tables 1, 3, 4 and 11 to 13, figures 4 and 5, and other loads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from sglang_hvd.paper import published
from sglang_hvd.paper.results import Measurement, Template
from sglang_hvd.paper.rounds import (
    Cell,
    Load,
    Missing,
    Total,
    over_rounds,
)
from sglang_hvd.paper.table_values import (
    METHODS,
    NONE,
    Column,
    Quoted,
    RunData,
    Table,
    TableRow,
    quoted,
    title_of,
)

_TEMPLATES: Mapping[Template, str] = {
    "none": "template omitted",
    "official": "official template",
}
_MEDIANS = (
    "Figures are medians over the rounds, with the lowest and the highest round; a mean is that of "
    "each round's mean."
)
_ONE_CHUNK = "A time near 0 per token is that of replies whose tokens came in one chunk."


def speedups(run: RunData) -> Table:
    """Table 1. For each baseline: both methods of the run, and the paper's."""
    model = list(published.MODELS).index(run.paper_model)
    columns = [
        Column(head, f"over {run.label(base)}", 2)
        for base in published.BASELINES
        for head in (*map(run.label, run.methods), "paper")
    ]
    rows = []
    for family, names in run.families().items():
        rows.append(TableRow(family))
        for name in names:
            paper = published.DATA_SETS.get(name)
            figures = [
                run.rounds.speedup(method, base, name)
                for base in published.BASELINES
                for method in run.methods
            ]
            cells = _beside(
                figures, len(run.methods), None if paper is None else paper.speedups[model]
            )
            cells.append(run.rounds.noise([name]))
            rows.append(TableRow(title_of(name), tuple(cells), run.marks(cells[:-1], [name])))
        if len(set(names) & set(run.data_sets)) > 1:
            rows.append(_mean_row(run, "Geometric mean", names))
    rows.append(TableRow("all data sets"))
    rows.append(_mean_row(run, "Geometric mean", run.data_sets))
    average = published.AVERAGES[model]
    rows.append(_mean_row(run, "Arithmetic mean (paper: of 16)", run.data_sets, paper=average))
    return Table(
        "Table 1",
        "Speedup: tokens per second over those of another way of decoding on the same prompts, one "
        f"request at a time. {_MEDIANS} Paper: {published.MODELS[run.paper_model]} on an H100. "
        "Noise: if one method were measured twice, the difference would exceed this in 5 % of "
        "cases. A smaller speedup may be chance.",
        "data set",
        (*columns, Column("noise, %", "", 1, 100)),
        tuple(rows),
    )


def _beside(
    figures: Sequence[Cell], num_methods: int, paper: Sequence[float] | None
) -> list[Cell | Quoted]:
    """For each baseline the speedups of the run's methods, and the paper's."""
    cells: list[Cell | Quoted] = []
    for index in range(len(figures) // num_methods):
        cells += figures[num_methods * index : num_methods * (index + 1)]
        cells.append(NONE if paper is None else Quoted(paper[index]))
    return cells


def _mean_row(
    run: RunData, name: str, data_sets: Sequence[str], *, paper: Sequence[float] | None = None
) -> TableRow:
    measured = [one for one in run.data_sets if one in data_sets]
    figures = [
        run.rounds.mean_speedup(method, base, measured, is_geometric=paper is None)
        for base in published.BASELINES
        for method in run.methods
    ]
    cells = _beside(figures, len(run.methods), paper)
    # The noise is that of a geometric mean.
    cells.append(run.rounds.noise(measured) if paper is None else NONE)
    return TableRow(name, tuple(cells), run.marks(cells[:-1], measured), is_mean=True)


def runs(run: RunData) -> Table:
    """Tables 11 to 13: that of the run's model."""
    data_sets = run.rounds.data_sets((*published.BASELINES, *METHODS))
    paper = published.RUNS[run.paper_model]
    heads = ("tokens/s", "cycles per 1K", "accepted per cycle", "cache, %", "EAGLE3, %")
    shown = dict(zip(heads, (1, 1, 2, 1, 1), strict=True))
    columns = [
        *(Column(h, "this run", n, 100 if "%" in h else 1) for h, n in shown.items()),
        *(Column(head, "this run", 1, 100) for head in ("both, %", "none, %")),
        *(Column(h, f"paper, {published.MODELS[run.paper_model]}", n) for h, n in shown.items()),
    ]
    number = 11 + list(published.MODELS).index(run.paper_model)
    rows = []
    for mode in run.modes:
        cells = _run_cells(run, mode, data_sets)
        of_paper = _paper_cells(paper.get(mode))
        rows.append(TableRow(run.label(mode), (*cells, *of_paper), run.marks(cells, data_sets)))
    return Table(
        f"Table {number}" if run.is_of_paper else "Tables 11 to 13",
        f"{_of_sets(data_sets)}, one request at a time. {_MEDIANS} A cycle verifies a draft of the "
        "cache, of EAGLE3, of both, or none. The paper does not give the last two shares.",
        "way of decoding",
        tuple(columns),
        tuple(rows),
    )


def runs_by_data_set(run: RunData) -> Table:
    """The figures of tables 11 to 13, of each data set by itself."""
    rows = []
    for names in run.run_families().values():
        for name in names:
            rows.append(TableRow(title_of(name)))
            for mode in run.modes:
                found = run.rounds.of(mode, name)
                cells = [
                    *_run_cells(run, mode, [name]),
                    _figure(run, found, lambda m: m.ttft_ms[0] if m.ttft_ms else None),
                    _figure(run, found, lambda m: m.tpot_ms[0] if m.tpot_ms else None),
                ]
                rows.append(TableRow(run.label(mode), tuple(cells), run.marks(cells, [name])))
    return Table(
        "Each data set",
        f"One request at a time. {_MEDIANS} {_ONE_CHUNK}",
        "way of decoding",
        (
            *(Column("tokens/s"), Column("cycles per 1K"), Column("accepted per cycle", "", 2)),
            *(Column("cache, %", "", 1, 100), Column("EAGLE3, %", "", 1, 100)),
            *(Column("both, %", "", 1, 100), Column("none, %", "", 1, 100)),
            *(Column("first token, ms"), Column("per token, ms")),
        ),
        tuple(rows),
    )


def other_models(run: RunData) -> list[Table]:
    """Those of tables 11 to 13 whose models the run is not of."""
    return [
        Table(
            f"Table {11 + index}",
            f"{title} in the paper, on an H100. This run is not of that model.",
            "way of decoding",
            (
                *(Column("tokens/s"), Column("cycles per 1K"), Column("accepted per cycle", "", 2)),
                *(Column("cache, %"), Column("EAGLE3, %")),
            ),
            tuple(
                TableRow(run.label(mode), tuple(_paper_cells(figures)))
                for mode, figures in published.RUNS[model].items()
            ),
        )
        for index, (model, title) in enumerate(published.MODELS.items())
        if model != run.result.model
    ]


def _run_cells(run: RunData, mode: str, data_sets: Sequence[str]) -> list[Cell]:
    """Throughput, cycles per 1000 tokens, accepted per cycle, and shares of the drafts' sources."""
    found = run.rounds.totals(mode, data_sets)
    return [
        _figure(run, found, lambda total: total.throughput),
        _figure(run, found, lambda total: total.cycles_per_1k),
        _figure(run, found, lambda total: total.mean_accepted),
        *(
            _figure(run, found, partial(Total.share, source=source))
            for source in ("cache", "model", "both", "none")
        ),
    ]


def _paper_cells(figures: published.PaperRun | None) -> list[Cell | Quoted]:
    if figures is None:
        return [NONE] * 5
    return quoted(
        *(figures.throughput, figures.cycles, figures.accepted, figures.cache, figures.eagle3)
    )


_OfRound = TypeVar("_OfRound", Measurement, Total)


def _figure(
    run: RunData, found: dict[int, _OfRound] | Missing, of: Callable[[_OfRound], float | None]
) -> Cell:
    """A figure of each round, as its median and spread."""
    if isinstance(found, Missing):
        return found
    values = {number: of(total) for number, total in found.items()}
    known = {number: value for number, value in values.items() if value is not None}
    return run.rounds.over(known) if known else NONE


def _of_sets(data_sets: Sequence[str]) -> str:
    names = ", ".join(map(title_of, data_sets))
    return f"All together: {names}" if names else "No data set has every way of decoding"


def breakdown(run: RunData) -> Table:
    """Figure 4."""
    data_sets = run.rounds.data_sets((*published.BASELINES, *METHODS))
    rows = []
    for mode in run.modes:
        found = run.rounds.totals(mode, data_sets)
        cells = [
            _figure(run, found, lambda total: total.cycles_per_1k),
            _figure(run, found, lambda total: total.cycle_ms),
        ]
        of_paper = quoted(*published.BREAKDOWN.get(mode, (None, None)))
        rows.append(TableRow(run.label(mode), (*cells, *of_paper), run.marks(cells, data_sets)))
    paper = f"paper, {published.MODELS[published.BREAKDOWN_MODEL]}"
    return Table(
        "Figure 4",
        f"{_of_sets(data_sets)}. Few cycles are worth little if each takes long: the product of "
        "both columns is the time of 1000 tokens.",
        "way of decoding",
        (
            *(Column("cycles per 1K", "this run"), Column("ms per cycle", "this run", 2)),
            *(Column("cycles per 1K", paper, 0), Column("ms per cycle", paper)),
        ),
        tuple(rows),
    )


def served(run: RunData) -> Table:
    """Table 3."""
    rows = []
    for name, paper in published.SERVED.items():
        figures = [
            run.rounds.speedup(method, base, name)
            for base in published.SERVED_BASELINES
            for method in run.methods
        ]
        cells = _beside(figures, len(run.methods), paper)
        rows.append(TableRow(title_of(name), tuple(cells), run.marks(cells, [name])))
    return Table(
        "Table 3",
        "Speedup in a serving system, one request at a time. Here it is SGLang, as on the whole "
        "page; in the paper vLLM with Qwen3-8B.",
        "data set",
        tuple(
            Column(head, f"over {run.label(base)}", 2)
            for base in published.SERVED_BASELINES
            for head in (*map(run.label, run.methods), "paper")
        ),
        tuple(rows),
    )


def templates(run: RunData) -> Table:
    """Table 4."""
    name = published.TEMPLATE_DATA_SET
    rows = []
    for mode in ("eagle3", *METHODS):
        for template, says in _TEMPLATES.items():
            found = run.rounds.totals(mode, [name], Load(template))
            cells = [
                _figure(run, found, lambda total: total.mean_accepted),
                _figure(run, found, lambda total: total.cycles_per_1k),
                _figure(run, found, lambda total: total.throughput),
            ]
            paper = published.TEMPLATES.get((template, mode))
            of_paper = (
                [NONE] * 3
                if paper is None
                else quoted(paper.accepted, paper.cycles, paper.throughput)
            )
            rows.append(
                TableRow(
                    f"{run.label(mode)}, {says}", (*cells, *of_paper), run.marks(cells, [name])
                )
            )
    heads = (("accepted per cycle", 2), ("cycles per 1K", 0), ("tokens/s", 1))
    paper_name = f"paper, {published.MODELS[published.TEMPLATE_MODEL]}"
    return Table(
        "Table 4",
        f"{title_of(name)} with and without the model's chat template, one request at a time.",
        "way of decoding and prompt",
        tuple(Column(h, group, n) for group in ("this run", paper_name) for h, n in heads),
        tuple(rows),
    )


def loads(run: RunData) -> Table:
    """Throughput and latency by load, which the paper does not have."""
    rows = []
    for load in run.loads():
        rows.append(TableRow(load_name(load)))
        data_sets, figures = load_figures(run, load)
        rows += [
            TableRow(run.label(mode), tuple(cells), run.marks(cells, data_sets))
            for mode, cells in figures.items()
        ]
    return Table(
        "Loads",
        "Throughput of all data sets together, and the geometric mean of the speedups, as the "
        "median over the rounds of each round's mean. Latency: the percentile is taken per data "
        f"set and round; the median is shown, with the lowest and the highest. {_ONE_CHUNK}",
        "way of decoding",
        (
            *(Column("tokens/s"), Column("over Greedy", "", 2)),
            *(Column(f"{p}th", "until the first token, ms") for p in (50, 90, 99)),
            *(Column(f"{p}th", "per further token, ms") for p in (50, 90, 99)),
        ),
        tuple(rows),
    )


def load_figures(run: RunData, load: Load) -> tuple[list[str], dict[str, list[Cell]]]:
    """The data sets that all modes have at a load, and by mode the columns of `loads`."""
    modes = [mode for mode in run.modes if run.rounds.data_sets([mode], load)]
    data_sets = run.rounds.data_sets(modes, load)
    figures = {}
    for mode in modes:
        found = run.rounds.totals(mode, data_sets, load)
        parts = [run.rounds.of(mode, name, load) for name in data_sets]
        whole = [part for part in parts if not isinstance(part, Missing)]
        all_of = [m for part in whole for m in part.values()]
        note = run.rounds.rounds_note(min(map(len, whole), default=0))
        figures[mode] = [
            _figure(run, found, lambda total: total.throughput),
            run.rounds.mean_speedup(mode, "greedy", data_sets, load),
            *(_percentile([m.ttft_ms for m in all_of], index, note) for index in range(3)),
            *(_percentile([m.tpot_ms for m in all_of], index, note) for index in range(3)),
        ]
    return data_sets, figures


def load_name(load: Load) -> str:
    if load.rate is not None:
        return f"{load.rate:g} requests per second"
    return (
        "1 request at a time" if load.concurrency == 1 else f"{load.concurrency} requests at a time"
    )


def _percentile(
    of: Sequence[tuple[float, float, float] | None], index: int, rounds_note: str
) -> Cell:
    """The median of one of several measurements' percentiles."""
    known = {number: one[index] for number, one in enumerate(of) if one is not None}
    return replace(over_rounds(known), rounds_note=rounds_note) if known else NONE


def machines(all_runs: Sequence[RunData]) -> Table:
    """Figure 5: EAGLE3 and the method on several machines."""
    name = published.GPU_DATA_SET
    rows = []
    for run in all_runs:
        shared = [name] if name in run.data_sets else run.rounds.data_sets(("eagle3", *METHODS))
        cells: list[Cell] = []
        for mode in ("eagle3", *METHODS):
            found = run.rounds.totals(mode, shared)
            cells += [
                _figure(run, found, lambda total: total.throughput),
                _figure(run, found, lambda total: total.cycles_per_1k),
            ]
        cells += [run.rounds.mean_speedup(method, "eagle3", shared) for method in METHODS]
        where = f"{run.machine}: {', '.join(map(title_of, shared))}" if shared else run.machine
        rows.append(TableRow(where, tuple(cells), run.marks(cells, shared)))
    rows.append(TableRow(f"paper: {published.MODELS[published.GPU_MODEL]}, InfiniteBench"))
    for gpu in published.GPUS:
        eagle3, method = (quoted(None, n) for n in (gpu.eagle3_cycles, gpu.method_cycles))
        rows.append(TableRow(gpu.gpu, (*eagle3, *method, *[NONE] * 2, Quoted(gpu.speedup), NONE)))
    first = all_runs[0]
    groups = [first.label(mode) for mode in ("eagle3", *METHODS)]
    return Table(
        "Figure 5",
        f"EAGLE3 and HVD by machine, one request at a time. {_MEDIANS} The text of the paper does "
        "not give the throughputs of its figure.",
        "machine",
        (
            *(Column(head, group) for group in groups for head in ("tokens/s", "cycles per 1K")),
            *(Column(group, f"over {groups[0]}", 2) for group in groups[1:]),
        ),
        tuple(rows),
    )


def mean_over(run: RunData, method: str, base: str) -> Cell:
    """The geometric mean of table 1."""
    return run.rounds.mean_speedup(method, base, run.data_sets)
