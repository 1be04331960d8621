"""Parts of a page: sections, legends, tables and what stands in their cells."""

from collections.abc import Sequence

from sglang_hvd.replay.findings import Finding
from sglang_hvd.replay.plots import escape, marker


def section(
    title: str,
    found: Finding,
    text: str,
    plots: tuple[str, str],
    legends: tuple[str, str],
    tables: str,
) -> str:
    figures = "".join(
        f"<figure><figcaption>{escape(caption)}</figcaption>{plot}{legend}</figure>"
        for caption, plot, legend in zip(found.plots, plots, legends, strict=True)
        if plot
    )
    return (
        f'<section><p class="topic">{escape(title)}</p><h2>{escape(found.summary)}</h2>'
        f'<p class="text">{escape(text)}</p><div class="plots">{figures}</div>{tables}</section>'
    )


def legend(entries: Sequence[tuple[str, int | None, str]], note: str = "") -> str:
    """entries: class of the colour, shape of the marker (None: a patch), text."""
    items = []
    for style, shape, text in entries:
        if shape is None:
            mark = f'<rect class="bar {style}" x="2" y="2" width="22" height="12"/>'
        else:
            mark = f'<path class="line {style}" d="M0 8L26 8"/>' + marker(
                shape, (13, 8), 5, style, text
            )
        items.append(
            f'<li><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 26 16" '
            f'aria-hidden="true">{mark}</svg>{escape(text)}</li>'
        )
    if note:
        items.append(f"<li>{escape(note)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def folded(title: str, table: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{table}</details>"


def table(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, num_texts: int = 1
) -> str:
    """num_texts: leading columns that hold no figures."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{_text_class(index, num_texts)}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return (
        f'<p class="caption">{escape(caption)}</p><div class="scroll">'
        f'<table aria-label="{escape(caption)}"><thead><tr>{line(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def share_cell(value: float | None) -> str:
    return "\u2013" if value is None else f"{100 * value:.1f}"


def tokens_cell(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.1f}"


def area_cell(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.3f}"


def _text_class(index: int, num_texts: int) -> str:
    return ' class="words"' if index < num_texts else ""
