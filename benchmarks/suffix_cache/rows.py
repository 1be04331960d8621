"""The rows that the benchmark reports."""

from dataclasses import asdict, dataclass

from sglang_hvd.replay.training.tables import markdown_table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: ours, the peer's if it ran, and their ratio.

    ratio: how many times better ours is; None without a peer.
    target: what ours must reach, as text; None if there is no target.
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
    names = ("name", "stream", "ours", "peer", "ratio", "unit", "target")
    return markdown_table({name: name for name in names}, map(asdict, rows), num_labels=2)
