"""What the demo prints: one row per workload and mode, and text coloured by draft source."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from sglang_hvd.demo.modes import MODES, Mode
from sglang_hvd.demo.play import Reply

ALL_WORKLOADS = "all"

_COLOURS = {
    "cache": "\033[32m",
    "model": "\033[36m",
    "both": "\033[35m",
    "target": "\033[0m",
}
_RESET = "\033[0m"


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one mode on one workload.

    Attributes:
        tokens_per_s: generated tokens per second of request time, prefill included.
        cycles_per_1k: decoding cycles per 1000 generated tokens, of which each reply's first is of
            its prefill.
        mean_accepted: accepted draft tokens per cycle, bonus tokens and those behind a reply's end
            not counted.
        ms_per_cycle: request time per cycle, prefill included.
        cache_share: share of cycles that verified a cache draft.
        outputs_identical: whether every reply equals plain decoding's.
    """

    workload: str
    mode: Mode
    tokens_per_s: float
    cycles_per_1k: float
    mean_accepted: float
    ms_per_cycle: float
    cache_share: float
    outputs_identical: bool


def rows(replies: Mapping[Mode, Sequence[Reply]]) -> list[Row]:
    """One row per workload and mode, then one per mode over all workloads."""
    workloads = list(dict.fromkeys(reply.family for reply in replies["plain"]))
    return [
        _row(workload, mode, replies)
        for workload in [*workloads, ALL_WORKLOADS]
        for mode in MODES
        if mode in replies
    ]


def _row(workload: str, mode: Mode, replies: Mapping[Mode, Sequence[Reply]]) -> Row:
    def of(mode: Mode) -> list[Reply]:
        return [r for r in replies[mode] if workload in (r.family, ALL_WORKLOADS)]

    mine = of(mode)
    num_tokens = sum(reply.num_tokens for reply in mine)
    num_cycles = sum(reply.counts.num_cycles for reply in mine)
    seconds = sum(reply.seconds for reply in mine)
    return Row(
        workload=workload,
        mode=mode,
        tokens_per_s=num_tokens / seconds,
        cycles_per_1k=1000 * num_cycles / num_tokens,
        mean_accepted=sum(reply.counts.num_accepted for reply in mine) / num_cycles,
        ms_per_cycle=1000 * seconds / num_cycles,
        cache_share=sum(reply.counts.num_cache_cycles for reply in mine) / num_cycles,
        outputs_identical=[r.text for r in mine] == [r.text for r in of("plain")],
    )


def table(all_rows: Iterable[Row]) -> str:
    """The rows as text. The gain columns compare tokens/s with eagle3 and plain of the same run."""
    all_rows = list(all_rows)
    speed = {(row.workload, row.mode): row.tokens_per_s for row in all_rows}
    lines = [
        f"{'workload':<11} {'mode':<10} {'tokens/s':>8} {'x eagle3':>8} {'x plain':>8} "
        f"{'cycles/1K':>9} {'accepted':>8} {'ms/cycle':>8} {'cache':>6}  identical"
    ]
    previous = None
    for row in all_rows:
        if previous not in (None, row.workload):
            lines.append("")
        previous = row.workload
        lines.append(
            f"{row.workload:<11} {row.mode:<10} {row.tokens_per_s:8.1f} "
            f"{_gain(row, 'eagle3', speed):>8} {_gain(row, 'plain', speed):>8} "
            f"{row.cycles_per_1k:9.0f} {row.mean_accepted:8.2f} {row.ms_per_cycle:8.1f} "
            f"{row.cache_share:6.0%}  {'yes' if row.outputs_identical else 'NO'}"
        )
    return "\n".join(lines)


def json_rows(all_rows: Iterable[Row]) -> list[dict[str, object]]:
    """The rows for --json."""
    return [asdict(row) for row in all_rows]


def shows_colours(stream: TextIO) -> bool:
    """Whether it is a terminal whose user has not refused them (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def coloured(tokens: Sequence[str], cycles: Iterable[tuple[str, int]]) -> str:
    """A reply in the colours of its draft sources.

    Args:
        tokens: text of each generated token.
        cycles: (draft source, accepted draft tokens) of each cycle in order. Each cycle also
            yields one token of the target itself, as the prefill did before the first.
    """
    sources = ["target"]
    for source, num_accepted_drafts in cycles:
        sources += [source] * num_accepted_drafts + ["target"]
    pieces, colour = [], None
    for token, source in zip(tokens, sources, strict=False):  # a reply may end inside a draft
        if _COLOURS[source] != colour:
            colour = _COLOURS[source]
            pieces.append(colour)
        pieces.append(token)
    return "".join(pieces) + _RESET


def legend() -> str:
    """What the colours mean."""
    return " ".join(f"{colour}{source}{_RESET}" for source, colour in _COLOURS.items())


def _gain(row: Row, over: Mode, speed: Mapping[tuple[str, Mode], float]) -> str:
    baseline = speed.get((row.workload, over))
    return "-" if baseline is None else f"{row.tokens_per_s / baseline:.2f}"
