"""What the plots are drawn into: matplotlib figures in the page's style, their rows and legends."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from sglang_hvd.view.pages import plain, share
from sglang_hvd.view.svg import colour, titled

# Units of the SVG, which scales with its place on the page; matplotlib calls them points.
_WIDTH, _HEIGHT, _ROW_HEIGHT, _LEGEND_HEIGHT = 440, 280, 42, 19
_LABEL_LEN, _NAME_LEN = 52, 26  # characters of a row's label and note, and of a name elsewhere
_SHADES = (1.0, 0.58, 0.25)  # of the parts of a bar
# Of series, of which each also has its colour.
MARKERS = "os^Dvp*X"
DASHES: tuple[Any, ...] = (
    *("-", "--", ":", "-.", (0, (7, 2)), (0, (3, 3)), (0, (5, 2, 1, 2, 1, 2)), (0, (1, 3))),
)

# Figures are created and written inside rc_context(STYLE).
STYLE: dict[Any, Any] = {
    "figure.dpi": 72,  # pixels and points are one
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a name may hold dollar signs
    "font.family": "sans-serif",
    "font.size": 13,
    "text.color": colour("ink"),
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": colour("axis"),
    "axes.labelcolor": colour("soft"),
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": colour("grid"),
    "xtick.color": colour("axis"),
    "xtick.labelcolor": colour("soft"),
    "ytick.labelcolor": colour("soft"),
    "ytick.major.size": 0,
    "lines.linewidth": 2.2,
    "legend.frameon": False,
    "legend.fontsize": 13,
    "legend.borderpad": 0,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.wspace": 0.08,
}


def xy_plot(handles: Sequence[Artist]) -> tuple[Figure, Axes]:
    """Two axes above a legend of the handles."""
    figure = _figure(_HEIGHT, handles)
    return figure, figure.add_subplot()


def row_plot(
    labels: Sequence[tuple[str, str]], handles: Sequence[Artist] = (), *, num_columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """Columns of axes above a legend, with rows at y = 0, 1, ... from the top. The label of a row
    stands above it and has a left and a right part."""
    figure = _figure(_ROW_HEIGHT * len(labels) + 50, handles)
    columns = list(figure.subplots(1, num_columns, sharey=True, squeeze=False)[0])
    for axes in columns:
        axes.set(yticks=[], ylim=(len(labels) - 0.6, -0.8))
    for index, (label, note) in enumerate(labels):
        ends = (columns[0], 0, _shortened(label, _LABEL_LEN - len(note))), (columns[-1], 1, note)
        for axes, x, text in ends:
            axes.text(
                *(x, index - 0.3, plain(text)),
                ha="right" if x else "left",
                transform=axes.get_yaxis_transform(),
                in_layout=False,
            )
    return figure, columns


def stack(axes: Axes, y: int, family: str, parts: Mapping[str, float], style: int) -> None:
    """Draws a bar of parts, end to end, in the row y. The style numbers the colour."""
    left = 0.0
    for (name, value), shade in zip(parts.items(), _SHADES, strict=False):
        [bar] = axes.barh(y, value, 0.35, left, color=colour(f"f{style}"), alpha=shade)
        bar.set_gid(titled(f"{family}: {share(value)} % {name}"))
        left += value


def name_points(axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes names beside points, given as x, y, name and colour. A name that finds no free place
    is left to the legend."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()  # settles where the points are
    taken = [
        Bbox.from_bounds(x - 7, y - 7, 14, 14)
        for x, y in axes.transData.transform([point[:2] for point in points])
    ]
    for x, y, name, of_family in points:
        for dx, dy, side in ((10, -4, "left"), (-10, -4, "right"), (0, 10, "center")):
            text = axes.annotate(
                *(_shortened(name, _NAME_LEN), (x, y), (dx, dy)),
                textcoords="offset points",
                ha=side,
                color=of_family,
                weight="bold",
                in_layout=False,
            )
            box = text.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and box.y1 <= axes.bbox.y1
            if name and inside and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()


def percent(axis: Axis, label: str) -> None:
    """Labels an axis of shares of 1 in percent."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:.3g}")
    axis.set_major_locator(MaxNLocator(5))
    axis.set_label_text(label)


def shades(names: Iterable[str]) -> list[Artist]:
    """Handles of the parts of a bar, for the legend."""
    return [
        Patch(color=colour("ink"), alpha=shade, label=name)
        for name, shade in zip(names, _SHADES, strict=False)
    ]


def _figure(height: float, handles: Sequence[Artist]) -> Figure:
    height += _LEGEND_HEIGHT * math.ceil(len(handles) / 2)
    figure = Figure(figsize=(_WIDTH / 72, height / 72), layout="constrained")
    if handles:
        figure.legend(
            *(handles, [_shortened(str(handle.get_label()), _NAME_LEN) for handle in handles]),
            loc="outside lower left",
            ncols=2,
        )
    return figure


def _shortened(text: str, max_len: int) -> str:
    text = plain(text)
    return text if len(text) <= max_len else text[: max_len - 1] + "\u2026"
