"""What the demo prints: a row per workload and mode, and replies coloured by draft source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from sglang_hvd.demo.modes import MODES, Mode
from sglang_hvd.demo.play import Reply
from sglang_hvd.view.cycles import Cycle, TokenSource, sources_of

ALL_WORKLOADS = "all"
TABLE_WIDTH = 100

# Styles tell sources apart on a terminal without colours, too.
_STYLES: dict[TokenSource, str] = {
    "prompt": "bold green",
    "output": "italic green",
    "shared": "bold yellow",
    "model": "underline cyan",
    "both": "bold underline magenta",
    "target": "",
}


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one mode on one workload.

    Attributes:
        tokens_per_s: generated tokens per second of request time, prefill included.
        cycles_per_1k: decoding cycles per 1000 generated tokens. The first token of each reply
            comes from the prefill.
        mean_accepted: accepted draft tokens per cycle, without bonus tokens and tokens after the
            end of a reply.
        ms_per_cycle: request time per cycle, prefill included.
        cache_share: share of cycles that verified a cache draft.
        outputs_identical: whether every reply equals that of plain decoding.
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


def table(all_rows: Sequence[Row]) -> Table:
    """The rows. The gain columns compare tokens/s with eagle3 and plain of the same run."""
    speed = {(row.workload, row.mode): row.tokens_per_s for row in all_rows}
    shown = Table(box=box.SIMPLE_HEAD, padding=0)
    for name in ("workload", "mode"):
        shown.add_column(name, no_wrap=True)
    for name in (
        *("tokens/s", "x eagle3", "x plain", "cycles/1K", "accepted", "ms/cycle", "cache"),
        "identical",
    ):
        shown.add_column(name, justify="right", no_wrap=True)
    for row, following in zip(all_rows, [*all_rows[1:], None], strict=True):
        shown.add_row(
            *(row.workload, row.mode, f"{row.tokens_per_s:.1f}"),
            *(_gain(row, over, speed) for over in ("eagle3", "plain")),
            *(f"{row.cycles_per_1k:.0f}", f"{row.mean_accepted:.2f}", f"{row.ms_per_cycle:.1f}"),
            *(f"{row.cache_share:.0%}", "yes" if row.outputs_identical else "NO"),
            end_section=following is not None and following.workload != row.workload,
        )
    return shown


def json_rows(all_rows: Iterable[Row]) -> list[dict[str, object]]:
    """The rows for --json."""
    return [asdict(row) for row in all_rows]


def by_source(tokens: Sequence[str], cycles: Iterable[Cycle]) -> Text:
    """A reply in the styles of its draft sources.

    Args:
        tokens: text of each generated token.
        cycles: its decoding cycles.
    """
    pieces = zip(tokens, sources_of(cycles, len(tokens)), strict=True)
    return Text.assemble(*((token, _STYLES[source]) for token, source in pieces))


def legend() -> Text:
    """The draft sources in their styles, each with its style in words."""
    return Text(", ").join(
        Text(f"{source} ({style or 'plain'})", style) for source, style in _STYLES.items()
    )


def _gain(row: Row, over: Mode, speed: Mapping[tuple[str, Mode], float]) -> str:
    baseline = speed.get((row.workload, over))
    return "-" if baseline is None else f"{row.tokens_per_s / baseline:.2f}"
