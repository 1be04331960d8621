"""What the benchmark reports."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: ours, the peer's where it ran, and their ratio.

    ratio: how many times better ours is; None without a peer.
    target: what ours is held to, as text; None where nothing was set.
    """

    name: str
    stream: str
    unit: str
    ours: float
    peer: float | None
    ratio: float | None
    target: str | None


def lower_is_better(
    name: str, stream: str, unit: str, ours: float, peer: float | None, target: str | None
) -> Row:
    ratio = None if peer is None or ours <= 0 else peer / ours
    return Row(name, stream, unit, ours, peer, ratio, target)


def higher_is_better(
    name: str, stream: str, unit: str, ours: float, peer: float | None, target: str | None
) -> Row:
    return Row(name, stream, unit, ours, peer, None if not peer else ours / peer, target)


def table(rows: list[Row]) -> str:
    header = ("name", "stream", "ours", "peer", "ratio", "unit", "target")
    cells = [
        (
            row.name,
            row.stream,
            f"{row.ours:.3f}",
            "-" if row.peer is None else f"{row.peer:.3f}",
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            row.unit,
            row.target or "",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [header, *cells]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
