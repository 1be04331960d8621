"""The plots of an analysis, drawn with matplotlib."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.replay.core.recordings import MEAN
from sglang_hvd.replay.report.analysis import RECALLS, Analysis, Calibration
from sglang_hvd.replay.report.findings import ORIGINS, PREDICTORS, VERIFIED, Finding
from sglang_hvd.replay.report.importance import Drop
from sglang_hvd.view.frames import (
    DASHES,
    MARKERS,
    STYLE,
    name_points,
    percent,
    row_plot,
    shades,
    stack,
    xy_plot,
)
from sglang_hvd.view.pages import share, tokens
from sglang_hvd.view.svg import colour, inline_svg, titled


def draw(analysis: Analysis, findings: Sequence[Finding]) -> list[list[Markup]]:
    """Two plots for each finding, called by its sentences; none where there is nothing to draw."""
    importance = analysis.importance
    with rc_context(STYLE):
        pairs = (
            (_copied(analysis), _cache_shares(analysis)),
            (_survival(analysis), _verified(analysis)),
            (_decisions(analysis), _curves(analysis)),
            (_probabilities(analysis), _lengths(analysis)),
            (_drops(importance.groups), _drops(importance.features)) if importance else (),
        )
        return [
            [
                inline_svg(figure, title=title, name=f"plots {number} {side}")
                for side, figure, title in zip(("left", "right"), pair, finding.plots, strict=False)
            ]
            for number, (pair, finding) in enumerate(zip(pairs, findings, strict=True))
        ]


# ---- cache drafts ----


def _copied(analysis: Analysis) -> Figure:
    families = [row for row in analysis.structure if row.file is None]
    origins = [ORIGINS[origin] for origin in families[0].copied_shares]
    figure, [axes] = row_plot(
        [(row.family, f"{share(row.copied_share)} %") for row in families], shades(origins)
    )
    for index, row in enumerate(families):
        parts = dict(zip(origins, row.copied_shares.values(), strict=True))
        stack(axes, index, row.family, parts, _style_of(analysis, row.family))
    percent(axes.xaxis, "places where the next token is right (%)")
    axes.set_xlim(0, max(0.01, *(row.copied_share for row in families)))
    return figure


def _cache_shares(analysis: Analysis) -> Figure:
    note = Line2D([], [], linestyle="none", label="large: family; small: file")
    figure, axes = xy_plot([*_family_handles(analysis), note])
    # A family is drawn after its files, which would hide it otherwise.
    rows = sorted(analysis.structure, key=lambda row: row.file is None)
    for row in rows:
        axes.plot(
            row.copied_share,
            row.cache_share,
            MARKERS[_style_of(analysis, row.family)],
            color=colour(f"f{_style_of(analysis, row.family)}"),
            markersize=6 if row.file else 12,
            markeredgecolor=colour("page"),
            alpha=0.55 if row.file else 1,
            gid=titled(row.file or row.family),
        )
    percent(axes.xaxis, "places where the next token is right (%)")
    percent(axes.yaxis, "cycles that verify a cache draft (%)")
    axes.set_xlim(0, max(0.01, 1.05 * max(row.copied_share for row in rows)))
    axes.set_ylim(0, max(0.01, 1.05 * max(row.cache_share for row in rows)))
    name_points(
        axes,
        [
            (
                row.copied_share,
                row.cache_share,
                "" if row.file else row.family,
                colour(f"f{_style_of(analysis, row.family)}"),
            )
            for row in rows
        ],
    )
    return figure


def _survival(analysis: Analysis) -> Figure:
    figure, axes = xy_plot(_family_handles(analysis, has_line=True))
    longest = len(analysis.payoffs[0].survival)
    for row in analysis.payoffs:
        style = _style_of(analysis, row.family)
        axes.plot(
            range(1, longest + 1),
            row.survival,
            color=colour(f"f{style}"),
            linestyle=DASHES[style],
            gid=titled(row.family),
        )
    axes.axvline(WORTH_LEN, color=colour("axis"), linestyle=":", linewidth=1)
    axes.text(
        *(WORTH_LEN + 0.5, 0.97, f"worth verifying: {WORTH_LEN} or more"),
        color=colour("soft"),
        va="top",
        transform=axes.get_xaxis_transform(),
    )
    axes.set(xlabel="accepted length, at least (tokens)", xlim=(1, longest))
    axes.set_xticks([1, WORTH_LEN, 12, 18, 24, longest])
    percent(axes.yaxis, "proposed cache drafts (%)")
    axes.set_ylim(0, max(0.01, *(row.survival[0] for row in analysis.payoffs)))
    return figure


def _verified(analysis: Analysis) -> Figure:
    figure, [axes] = row_plot(
        [
            (row.family, f"drafts: {row.num_verified}, mean {tokens(row.verified_mean_accepted)}")
            for row in analysis.payoffs
        ],
        shades(VERIFIED.values()),
    )
    for index, row in enumerate(analysis.payoffs):
        parts = {
            text: value
            for name, text in VERIFIED.items()
            if (value := getattr(row, f"verified_{name}_share")) is not None
        }
        stack(axes, index, row.family, parts, _style_of(analysis, row.family))
    percent(axes.xaxis, "verified cache drafts (%)")
    axes.set_xlim(0, 1)
    return figure


# ---- predictors ----


def _decisions(analysis: Analysis) -> Figure:
    rows = [row for row in analysis.quality if row.at == "cycle"]
    families = list(dict.fromkeys(row.file for row in rows))
    figure, columns = row_plot(
        [("mean of the families" if file == MEAN else file, "") for file in families],
        _predictor_handles({row.predictor for row in rows}),
        num_columns=2,
    )
    for axes, name in zip(columns, ("precision", "recall"), strict=True):
        for row in reversed(rows):  # the predictor comes last and is hidden by none
            value = getattr(row.quality, name)
            if value is not None:
                axes.plot(
                    *(value, families.index(row.file)),
                    **_marker_of(row.predictor),
                    gid=titled(f"{PREDICTORS[row.predictor]}: {name} {share(value)} %"),
                )
        percent(axes.xaxis, f"{name} (%)")
        axes.set_xlim(0, 1)
    return figure


def _curves(analysis: Analysis) -> Figure:
    figure, axes = xy_plot(_predictor_handles({curve.predictor for curve in analysis.curves}))
    for curve in analysis.curves:
        name = PREDICTORS[curve.predictor]
        axes.plot(RECALLS, curve.at_recall, **_line_of(curve.predictor), gid=titled(name))
        if curve.precision is not None and curve.recall is not None:
            axes.plot(
                *(curve.recall, curve.precision),
                **_marker_of(curve.predictor),
                gid=titled(f"{name}: as decided"),
            )
    percent(axes.xaxis, "recall (%)")
    percent(axes.yaxis, "precision (%)")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    return figure


def _probabilities(analysis: Analysis) -> Figure:
    figure, axes = _reliability([one for one in analysis.calibration if one.of == "probability"])
    percent(axes.xaxis, f"predicted to yield {WORTH_LEN} tokens (%)")
    percent(axes.yaxis, "drafts that do (%)")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    return figure


def _lengths(analysis: Analysis) -> Figure:
    lengths = [one for one in analysis.calibration if one.of == "length"]
    figure, axes = _reliability(lengths)
    top = math.ceil(max(max(b.predicted, b.real, 1) for one in lengths for b in one.bins))
    axes.set(xlabel="predicted accepted length (tokens)", ylabel="mean accepted length (tokens)")
    axes.set(xlim=(0, top), ylim=(0, top))
    return figure


def _reliability(calibrations: Sequence[Calibration]) -> tuple[Figure, Axes]:
    figure, axes = xy_plot(_predictor_handles({one.predictor for one in calibrations}))
    axes.axline((0, 0), slope=1, color=colour("axis"), linestyle=":", linewidth=1)
    for one in calibrations:
        num_drafts = sum(b.num_drafts for b in one.bins)
        points = [(max(0.0, b.predicted), b.real) for b in one.bins]
        axes.plot(*zip(*points, strict=True), **_line_of(one.predictor))
        for point, b in zip(points, one.bins, strict=True):
            axes.plot(
                *point,
                **_marker_of(one.predictor, size=6 + 14 * (b.num_drafts / num_drafts) ** 0.5),
                gid=titled(f"{PREDICTORS[one.predictor]}: {b.num_drafts} drafts"),
            )
    return figure, axes


def _drops(drops: Sequence[Drop]) -> Figure:
    figure, [axes] = row_plot([(drop.name, f"{drop.drop:.3f}") for drop in drops])
    for index, drop in enumerate(drops):
        [bar] = axes.barh(
            *(index, drop.drop),
            height=0.35,
            color=colour("p0"),
            xerr=drop.deviation or None,
            ecolor=colour("soft"),
        )
        bar.set_gid(titled(f"{drop.name}: {drop.drop:.3f}"))
    axes.axvline(0, color=colour("axis"), linewidth=1)
    axes.set_xlabel("loss of average precision")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure


# ---- colours, markers and dashes: those of a family or predictor hold on the whole page ----


def _style_of(analysis: Analysis, family: str) -> int:
    """A family's colour, marker and dashes, the same on the whole page."""
    return analysis.families.index(family) % len(MARKERS)


def _family_handles(analysis: Analysis, *, has_line: bool = False) -> list[Artist]:
    styles = {family: _style_of(analysis, family) for family in analysis.families}
    return [
        Line2D(
            *([], []),
            color=colour(f"f{style}"),
            linestyle=DASHES[style] if has_line else "none",
            marker="none" if has_line else MARKERS[style],
            markersize=9,
            label=family,
        )
        for family, style in styles.items()
    ]


def _predictor_handles(names: Iterable[str]) -> list[Artist]:
    return [
        Line2D([], [], **(_line_of(name) | _marker_of(name)), label=PREDICTORS[name])
        for name in sorted(names, key=list(PREDICTORS).index)
    ]


def _line_of(predictor: str) -> dict[str, Any]:
    index = list(PREDICTORS).index(predictor)
    return {"color": colour(f"p{index}"), "linestyle": DASHES[index]}


def _marker_of(predictor: str, *, size: float = 11) -> dict[str, Any]:
    """The analysed predictor's markers are filled, the others' are hollow."""
    index = list(PREDICTORS).index(predictor)
    return {
        "marker": MARKERS[index],
        "markersize": size,
        "markeredgecolor": colour(f"p{index}" if index else "page"),
        "markeredgewidth": 2 if index else 1,
        "markerfacecolor": colour("page" if index else "p0"),
    }
