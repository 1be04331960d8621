"""Plots as inline SVG. Colours, dashes and fonts are classes of the page they stand in.

Every plot is WIDTH units wide and scales with its place on the page.
"""

import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH = 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 44
_HEIGHT = 300
_CHARACTER, _BOLD_CHARACTER = 7.2, 8.4  # units wide, at most on average, of the text in a plot

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """label: what it shows, with its unit. ticks: where, and what is written there."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    @classmethod
    def of_shares(cls, label: str, high: float = 1.0) -> "Axis":
        """An axis in percent, from 0 to at least the share high."""
        steps = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2) if high <= 5 * step)
        top = steps * max(1, math.ceil(high / steps - 1e-9))
        num = round(top / steps)
        return cls(label, 0, top, [(i * steps, f"{100 * i * steps:.0f}") for i in range(num + 1)])


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one name. style: class of its colour; marker: index of its shape; None: a line.

    sizes: radius of each marker; None: all the same.
    """

    name: str
    style: str
    points: Sequence[Point]
    marker: int | None = None
    sizes: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a bar. style: classes of its colour."""

    name: str
    value: float
    style: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar of parts, end to end. note: written at the right of its label.

    spread: half the length of the whisker at its end; 0: none.
    """

    label: str
    parts: Sequence[Part]
    note: str
    spread: float = 0.0


def plain(text: str) -> str:
    """Text of any origin, with a mark for what neither XML nor a terminal can take: control
    characters and lone surrogates."""
    return _NOT_TEXT.sub("\ufffd", text)


def escape(text: str) -> str:
    """The same, for HTML and XML."""
    return html.escape(plain(text))


_NOT_TEXT = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def shorten(text: str, num_characters: int) -> str:
    return text if len(text) <= num_characters else text[: num_characters - 1] + "\u2026"


def xy_plot(
    title: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    *,
    rules: Sequence[tuple[Point, Point, str]] = (),
    labels: Sequence[tuple[Point, str, str]] = (),
) -> str:
    """Lines and markers over two axes.

    rules: thin lines from one point to another, with what is written at their end.
    labels: text beside a point, and its colour's class; left out where it would hide another.
    """
    bottom = _HEIGHT - _BOTTOM
    to_x = _scale(x, _LEFT, WIDTH - _RIGHT)
    to_y = _scale(y, bottom, _TOP)
    body = []
    for value, text in y.ticks:
        at = to_y(value)
        body.append(_line((_LEFT, at), (WIDTH - _RIGHT, at), "grid"))
        body.append(_text(_LEFT - 7, at + 4.5, text, "tick", "end"))
    for value, text in x.ticks:
        at = to_x(value)
        body.append(_line((at, bottom), (at, bottom + 4), "axis"))
        body.append(_text(at, bottom + 18, text, "tick", "middle"))
    body.append(_line((_LEFT, bottom), (WIDTH - _RIGHT, bottom), "axis"))
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    body.append(_text(middle, _HEIGHT - 6, x.label, "label", "middle"))
    turned = f'transform="rotate(-90 13 {(_TOP + bottom) / 2:.1f})"'
    body.append(_text(13, (_TOP + bottom) / 2, y.label, "label", "middle", turned))
    for start, end, text in rules:
        first, last = (to_x(start[0]), to_y(start[1])), (to_x(end[0]), to_y(end[1]))
        body.append(_line(first, last, "rule"))
        is_upright = start[0] == end[0]
        place = (last[0] + 5, last[1] + 10) if is_upright else (last[0] - 4, last[1] - 5)
        body.append(_text(*place, text, "note", "start" if is_upright else "end"))
    for one in series:
        points = [(to_x(a), to_y(b)) for a, b in one.points]
        if len(points) > 1:
            path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
            body.append(f'<path class="line {one.style}" d="{path}">{_title(one.name)}</path>')
        if one.marker is not None:
            sizes = one.sizes or [5.0] * len(points)
            body += [
                marker(one.marker, point, size, one.style, one.name)
                for point, size in zip(points, sizes, strict=True)
            ]
    taken = [(to_x(a) - 7, to_y(b) - 7, 14.0, 14.0) for one in series for a, b in one.points]
    for (a, b), text, style in labels:
        body += _beside(to_x(a), to_y(b), text, style, taken)
    return _svg(title, _HEIGHT, body)


def bar_plot(title: str, x: Axis, bars: Sequence[Bar]) -> str:
    """Bars beneath their labels. The axis may begin below 0; a single part then begins at 0."""
    step, top = 42, 8
    bottom = top + step * len(bars)
    to_x = _scale(x, 8, WIDTH - 16)
    body = []
    for value, text in x.ticks:
        body.append(_line((to_x(value), top), (to_x(value), bottom), "grid"))
        half = _CHARACTER * len(text) / 2
        is_cut = to_x(value) - half < 0, to_x(value) + half > WIDTH
        anchor = "start" if is_cut[0] else "end" if is_cut[1] else "middle"
        body.append(_text(to_x(value), bottom + 16, text, "tick", anchor))
    body.append(_line((to_x(0), top), (to_x(0), bottom), "axis"))
    for index, bar in enumerate(bars):
        y = top + step * index
        space = int((WIDTH - 24) / _CHARACTER) - len(bar.note) - 2
        body.append(_text(8, y + 14, shorten(bar.label, space), "row", "start"))
        body.append(_text(WIDTH - 16, y + 14, bar.note, "value", "end"))
        reached = 0.0
        for part in bar.parts:
            ends = sorted((to_x(reached), to_x(reached + part.value)))
            body.append(
                f'<rect class="bar {part.style}" x="{ends[0]:.1f}" y="{y + 20}" '
                f'width="{ends[1] - ends[0]:.1f}" height="14">{_title(part.name)}</rect>'
            )
            reached += part.value
        if bar.spread:
            ends = [to_x(max(x.low, min(x.high, reached + s * bar.spread))) for s in (-1, 1)]
            body.append(_line((ends[0], y + 27), (ends[1], y + 27), "whisker"))
    body.append(_text(WIDTH / 2, bottom + 38, x.label, "label", "middle"))
    return _svg(title, bottom + 46, body)


def dot_plot(
    title: str, columns: Sequence[Axis], rows: Sequence[tuple[str, Sequence[Sequence[Series]]]]
) -> str:
    """Rows of a label and, in each column, markers on a line; only the x of a point counts."""
    step, top, gap = 46, 26, 28
    bottom = top + step * len(rows)
    width = (WIDTH - 24 - gap * (len(columns) - 1)) / len(columns)
    body = []
    for column, x in enumerate(columns):
        left = 10 + column * (width + gap)
        to_x = _scale(x, left, left + width)
        for value, text in x.ticks:
            body.append(_line((to_x(value), top), (to_x(value), bottom), "grid"))
            body.append(_text(to_x(value), bottom + 16, text, "tick", "middle"))
        body.append(_text(left + width / 2, bottom + 38, x.label, "label", "middle"))
        for index, (_, cells) in enumerate(rows):
            y = top + step * index + 26
            body.append(_line((left, y), (left + width, y), "axis"))
            for one in cells[column]:
                body += [
                    marker(one.marker or 0, (to_x(point[0]), y), 6, one.style, one.name)
                    for point in one.points
                ]
    for index, (label, _) in enumerate(rows):
        text = shorten(label, int((WIDTH - 24) / _CHARACTER))
        body.append(_text(8, top + step * index + 10, text, "row", "start"))
    return _svg(title, bottom + 46, body)


def marker(shape: int, at: Point, radius: float, style: str, name: str) -> str:
    """One of eight shapes of about the same area."""
    x, y = at
    corners = _SHAPES[shape % len(_SHAPES)]
    if not corners:
        return (
            f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">'
            f"{_title(name)}</circle>"
        )
    path = "M" + "L".join(f"{x + radius * a:.1f} {y + radius * b:.1f}" for a, b in corners) + "Z"
    return f'<path class="dot {style}" d="{path}">{_title(name)}</path>'


_SHAPES: tuple[tuple[Point, ...], ...] = (
    (),  # a circle
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.2), (1.15, 0.9), (-1.15, 0.9)),
    ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    ((0, 1.2), (1.15, -0.9), (-1.15, -0.9)),
    ((-0.7, -1.2), (0.7, -1.2), (0.7, 1.2), (-0.7, 1.2)),
    ((-1.2, -0.7), (1.2, -0.7), (1.2, 0.7), (-1.2, 0.7)),
    ((0, -1.2), (1.1, -0.4), (0.7, 1), (-0.7, 1), (-1.1, -0.4)),
)


def _scale(axis: Axis, first: float, last: float) -> Callable[[float], float]:
    return lambda value: first + (value - axis.low) / (axis.high - axis.low) * (last - first)


def _beside(
    x: float, y: float, text: str, style: str, taken: list[tuple[float, float, float, float]]
) -> list[str]:
    """The text at a free place beside the point; the place is added to those taken."""
    text = shorten(text, 24)
    width = _BOLD_CHARACTER * len(text)
    for left, base in (
        *((x + 11, y + 4.5), (x - 11 - width, y + 4.5)),
        *((x - width / 2, y - 12), (x - width / 2, y + 21)),
        *((x + 8, y - 10), (x + 8, y + 18), (x - 8 - width, y - 10), (x - 8 - width, y + 18)),
    ):
        box = (left, base - 12, width, 15.0)
        inside = left >= _LEFT and left + width <= WIDTH and _TOP <= base <= _HEIGHT - _BOTTOM - 4
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            # From the side that is next to the marker: text is narrower in most fonts.
            anchor = "end" if left + width <= x else "start"
            at = left + width if anchor == "end" else left
            return [_text(at, base, text, f"name {style}", anchor)]
    return []


def _overlap(
    one: tuple[float, float, float, float], other: tuple[float, float, float, float]
) -> bool:
    return all(
        one[side] < other[side] + other[side + 2] and other[side] < one[side] + one[side + 2]
        for side in (0, 1)
    )


def _line(start: Point, end: Point, style: str) -> str:
    return (
        f'<line class="{style}" x1="{start[0]:.1f}" y1="{start[1]:.1f}" '
        f'x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'
    )


def _text(x: float, y: float, text: str, style: str, anchor: str, more: str = "") -> str:
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        f"{' ' + more if more else ''}>{escape(text)}</text>"
    )


def _title(name: str) -> str:
    return f"<title>{escape(name)}</title>"


def _svg(title: str, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    )
