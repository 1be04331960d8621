"""The plots of a result, drawn with matplotlib. What they show also stands in the tables."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from sglang_hvd.config import MARGINAL_LEN, WORTH_LEN
from sglang_hvd.paper import published
from sglang_hvd.paper.draft_tables import (
    Payoffs,
    cache_share,
    family_signs,
    pooled,
    precision,
    recall,
    sign_names,
)
from sglang_hvd.paper.results import Selection
from sglang_hvd.paper.rounds import Cell, Measured
from sglang_hvd.paper.speed_tables import mean_over
from sglang_hvd.paper.table_values import METHODS, RunData, title_of
from sglang_hvd.view.frames import (
    DASHES,
    MARKERS,
    name_points,
    percent,
    row_plot,
    shades,
    stack,
    xy_plot,
)
from sglang_hvd.view.pages import plain, share, tokens
from sglang_hvd.view.svg import colour, titled

# Colours of the modes: the two methods' are the most distinct.
_COLOURS = {
    "greedy": 5,
    "eagle3": 1,
    "suffix": 2,
    "frequency": 3,
    "hvd-paper": 0,
    "hvd": 6,
}
_OTHER_COLOURS = (4, 7)
_BAR = 0.17  # height, of rows that are 1 high

Points = Sequence[tuple[float, float]]


def speedup_bars(run: RunData, base: str) -> Figure:
    """Both methods' speedups over a mode by data set, with the paper's where it has the model."""
    names = run.data_sets
    rows = [
        (title_of(name), [run.rounds.speedup(method, base, name) for method in run.methods])
        for name in names
    ]
    rows.append(("geometric mean", [mean_over(run, method, base) for method in run.methods]))
    handles = _patches(run, run.methods)
    if run.is_of_paper:
        handles.append(_diamond("the paper's"))
    figure, [axes] = row_plot([(title, _times(cells)) for title, cells in rows], handles)
    for y, (title, cells) in enumerate(rows):
        _bars(run, axes, y, title, cells)
    shown = [c.high for _, cells in rows for c in cells if isinstance(c, Measured)]
    if run.is_of_paper:
        model = list(published.MODELS).index(run.paper_model)
        column = published.BASELINES.index(base)
        for y, name in enumerate(names):
            if name in published.DATA_SETS:
                value = published.DATA_SETS[name].speedups[model][column]
                at = value, y + _BAR / 2
                shown.append(value)
                axes.add_line(_diamond(f"{title_of(name)}: {value:.2f} in the paper", at))
    axes.axvline(1, color=colour("axis"), linewidth=1)
    axes.set_xlabel(plain(f"speedup over {run.label(base)}"))
    _from_zero(axes, x=shown)
    return figure


def _diamond(name: str, at: tuple[float, float] | None = None) -> Line2D:
    """A figure of the paper. at: None in a legend."""
    return Line2D(
        *([], []) if at is None else ([at[0]], [at[1]]),
        marker="D",
        markersize=8,
        linestyle="none",
        color=colour("ink"),
        markerfacecolor=colour("page"),
        markeredgewidth=2,
        label=name,
        gid=titled(name),
    )


def _times(cells: Iterable[Cell]) -> str:
    return ", ".join(f"{c.value:.2f}" if isinstance(c, Measured) else c.why for c in cells)


def _bars(
    run: RunData, axes: Axes, y: float, title: str, cells: Sequence[Cell], *, scale: float = 1
) -> None:
    for index, (method, cell) in enumerate(zip(run.methods, cells, strict=True)):
        if isinstance(cell, Measured):
            value = scale * cell.value
            errors = [[value - scale * cell.low], [scale * cell.high - value]]
            [bar] = axes.barh(
                *(y + index * (_BAR + 0.02), value, _BAR),
                color=_colour(run, method),
                xerr=errors if cell.low < cell.high else None,
                ecolor=colour("soft"),
            )
            bar.set_gid(titled(f"{title}, {run.label(method)}: {value:.2f}"))


def breakdown(names: Mapping[str, str], points: Mapping[str, tuple[float, float]]) -> Figure:
    """Milliseconds per cycle over cycles per 1000 tokens. Both mappings are by mode."""
    order = list(names)
    figure, axes = xy_plot(
        [
            Line2D(
                *([], []),
                linestyle="none",
                marker=MARKERS[order.index(mode) % len(MARKERS)],
                color=_colour_of(order, mode),
                markersize=9,
                label=names[mode],
            )
            for mode in points
        ]
    )
    for mode, (cycles, cycle_ms) in points.items():
        axes.plot(
            *(cycles, cycle_ms),
            MARKERS[order.index(mode) % len(MARKERS)],
            color=_colour_of(order, mode),
            markersize=11,
            markeredgecolor=colour("page"),
            gid=titled(f"{names[mode]}: {cycles:.0f} cycles of {cycle_ms:.1f} ms"),
        )
    axes.set(xlabel="cycles per 1000 tokens", ylabel="milliseconds per cycle")
    _from_zero(axes, x=[p[0] for p in points.values()], y=[p[1] for p in points.values()])
    name_points(axes, [(*point, names[mode], colour("ink")) for mode, point in points.items()])
    return figure


def signs(run: RunData) -> Figure:
    """A map of structural signs by family (figure 2a). A stronger colour is a higher count."""
    found = family_signs(run)
    columns = sign_names(run)
    figure, [axes] = row_plot([(family, "") for family in found])
    for x, sign in enumerate(columns):
        most = max((of.get(sign, 0.0) for of in found.values()), default=0.0)
        for y, (family, of) in enumerate(found.items()):
            value = of.get(sign, 0.0)
            [cell] = axes.barh(
                *(y + 0.05, 0.94, 0.5, x + 0.03),
                color=colour("f0"),
                alpha=0.05 + 0.4 * value / most if most else 0.05,
            )
            cell.set_gid(titled(f"{family}: {value:.2f} {sign}"))
            axes.text(x + 0.5, y + 0.05, f"{value:.1f}", ha="center", va="center")
    axes.set_xlim(0, max(1, len(columns)))
    names = [plain(sign).replace(" ", "\n") for sign in columns]
    axes.set_xticks([x + 0.5 for x in range(len(columns))], names)
    axes.grid(visible=False)
    return figure


def cache_shares(run: RunData) -> Figure:
    """How often cache drafts are selected, by data set (figure 2b)."""
    rows = [(title_of(n), [cache_share(run, m, [n]) for m in run.methods]) for n in run.data_sets]
    figure, [axes] = row_plot(
        [(title, _percents(cells)) for title, cells in rows], _patches(run, run.methods)
    )
    for y, (title, cells) in enumerate(rows):
        _bars(run, axes, y, title, cells)
    percent(axes.xaxis, "cycles that verify a cache draft (%)")
    _from_zero(axes, x=[c.value for _, cells in rows for c in cells if isinstance(c, Measured)])
    return figure


def _percents(cells: Iterable[Cell]) -> str:
    return ", ".join(f"{share(c.value)} %" if isinstance(c, Measured) else c.why for c in cells)


def payoff_bars(of_families: Mapping[str, Payoffs]) -> Figure:
    """Shares of worthless, marginal and worthwhile drafts by family (figure 3)."""
    names = (
        f"{WORTH_LEN} tokens or more",
        f"{MARGINAL_LEN} to {WORTH_LEN - 1}",
        f"0 to {MARGINAL_LEN - 1}",
    )
    figure, [axes] = row_plot(
        [
            (family, f"drafts: {of.num_drafts}, mean {tokens(of.mean)}")
            for family, of in of_families.items()
        ],
        shades(names),
    )
    for y, (family, of) in enumerate(of_families.items()):
        parts = dict(zip(names, (of.high, of.marginal, of.low), strict=True))
        stack(axes, y, family, parts, y % len(MARKERS))
    percent(axes.xaxis, "verified cache drafts (%)")
    axes.set_xlim(0, 1)
    return figure


def survival(of_families: Mapping[str, Payoffs]) -> Figure:
    """Share of the drafts with at least so many accepted tokens."""
    styles = {
        f: {"color": colour(f"f{i % 8}"), "linestyle": DASHES[i % 8]}
        for i, f in enumerate(of_families)
    }
    figure, axes = xy_plot([Line2D([], [], label=f, **style) for f, style in styles.items()])
    for family, of in of_families.items():
        lens = range(1, len(of.survival) + 2)
        axes.plot(lens, (*of.survival, 0.0), gid=titled(family), **styles[family])
    axes.axvline(WORTH_LEN, color=colour("axis"), linestyle=":", linewidth=1)
    axes.set(xlabel="accepted length, at least (tokens)")
    percent(axes.yaxis, "verified cache drafts (%)")
    axes.set_xlim(1, max(2, *(len(of.survival) + 1 for of in of_families.values())))
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def decisions(run: RunData) -> Figure:
    """Precision and recall of the predictor's selection by data set, with the paper's."""
    found = [(title_of(one.data_set), one) for one in run.result.selections]
    whole = pooled(run.result.selections)
    assert whole is not None, "there are selections to draw"
    rows: list[tuple[str, Selection]] = [*found, ("all data sets", whole)]
    handles: list[Artist] = [
        Line2D([], [], marker="o", linestyle="none", color=colour("p0"), label="this run")
    ]
    if run.is_of_paper:
        handles.append(_diamond("the paper's"))
    figure, columns = row_plot([(title, "") for title, _ in rows], handles, num_columns=2)
    paper = published.SELECTIONS[run.paper_model]
    for axes, name, of, quote in zip(
        columns,
        ("precision", "recall"),
        (precision, recall),
        (paper.precision, paper.recall),
        strict=True,
    ):
        for y, (title, selection) in enumerate(rows):
            cell = of(selection)
            if isinstance(cell, Measured):
                axes.plot(
                    *(cell.value, y, "o"),
                    color=colour("p0"),
                    markersize=10,
                    gid=titled(f"{title}: {name} {share(cell.value)} %"),
                )
        if run.is_of_paper:
            at = quote / 100, len(rows) - 1
            axes.add_line(_diamond(f"the paper's {name}: {quote:g} %", at))
        percent(axes.xaxis, f"{name} (%)")
        axes.set_xlim(0, 1)
    return figure


def calibration(whole: Selection) -> Figure:
    """Mean accepted over mean predicted length. A larger marker stands for more drafts."""
    figure, axes = xy_plot([])
    axes.axline((0, 0), slope=1, color=colour("axis"), linestyle=":", linewidth=1)
    points = [(max(0.0, b.predicted), b.accepted) for b in whole.calibration]
    axes.plot(*zip(*points, strict=True), color=colour("p0"))
    for point, b in zip(points, whole.calibration, strict=True):
        axes.plot(
            *(*point, "o"),
            color=colour("p0"),
            markeredgecolor=colour("page"),
            markersize=6 + 14 * math.sqrt(b.num_drafts / whole.num_proposed),
            gid=titled(f"{b.num_drafts} drafts"),
        )
    top = math.ceil(max(1.0, *(value for point in points for value in point)))
    axes.set(xlabel="predicted accepted length (tokens)", ylabel="mean accepted length (tokens)")
    axes.set(xlim=(0, top), ylim=(0, 1.05 * top))
    return figure


def curves(run: RunData, of_modes: Mapping[str, Points], *, x: str, y: str) -> Figure:
    """A line for each mode."""
    order = run.modes
    styles: dict[str, dict[str, Any]] = {
        mode: {
            "color": _colour(run, mode),
            "linestyle": DASHES[order.index(mode) % len(DASHES)],
            "marker": MARKERS[order.index(mode) % len(MARKERS)],
            "markersize": 8,
            "markeredgecolor": colour("page"),
        }
        for mode in of_modes
    }
    handles = [Line2D([], [], label=run.label(mode), **style) for mode, style in styles.items()]
    figure, axes = xy_plot(handles)
    for mode, points in of_modes.items():
        axes.plot(*zip(*points, strict=True), gid=titled(run.label(mode)), **styles[mode])
    xs = sorted({point[0] for points in of_modes.values() for point in points})
    axes.set(xlabel=x, ylabel=y, xscale="log" if xs[0] > 0 and xs[-1] >= 8 * xs[0] else "linear")
    axes.set_xticks(xs, [f"{value:g}" for value in xs])
    axes.set_xticks([], minor=True)
    _from_zero(axes, y=[point[1] for points in of_modes.values() for point in points])
    return figure


def machine_bars(
    runs: Sequence[RunData],
    rows: Sequence[tuple[str, Mapping[str, float]]],
    *,
    label: str,
    form: str,
) -> Figure:
    """Figures of EAGLE3 and the methods by machine. rows: machine, and figures by mode."""
    modes = ("eagle3", *METHODS)
    run = runs[0]
    figure, [axes] = row_plot(
        [(name, ", ".join(format(v, form) for v in of.values())) for name, of in rows],
        _patches(run, [mode for mode in modes if any(mode in of for _, of in rows)]),
    )
    height = 0.13
    for y, (name, of) in enumerate(rows):
        for mode, value in of.items():
            [bar] = axes.barh(
                *(y - 0.05 + modes.index(mode) * (height + 0.02), value, height),
                color=_colour(run, mode),
            )
            bar.set_gid(titled(f"{name}, {run.label(mode)}: {format(value, form)}"))
    axes.set_xlabel(label)
    _from_zero(axes, x=[value for _, of in rows for value in of.values()])
    return figure


def _patches(run: RunData, modes: Iterable[str]) -> list[Artist]:
    return [Patch(color=_colour(run, mode), label=run.label(mode)) for mode in modes]


def _colour(run: RunData, mode: str) -> str:
    return _colour_of(run.modes, mode)


def _colour_of(order: Sequence[str], mode: str) -> str:
    others = [one for one in order if one not in _COLOURS]
    number = _COLOURS.get(mode)
    if number is None:
        number = _OTHER_COLOURS[others.index(mode) % len(_OTHER_COLOURS)]
    return colour(f"f{number}")


def _from_zero(axes: Axes, *, x: Sequence[float] = (), y: Sequence[float] = ()) -> None:
    """Axes from zero to a little more than the largest of these values."""
    if x:
        axes.set_xlim(0, 1.08 * max(*x, 1e-3))
    if y:
        axes.set_ylim(0, 1.12 * max(*y, 1e-3))
