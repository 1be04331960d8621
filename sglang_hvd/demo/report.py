"""The demo's figures: a row per workload and mode, as a table, as JSON and in sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from sglang_hvd.demo.modes import MODES, Mode
from sglang_hvd.demo.play import Reply

ALL_WORKLOADS = "all"


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
    """One row per workload and mode, then one per mode over all workloads if there are several."""
    workloads = list(dict.fromkeys(reply.family for reply in replies["plain"]))
    if len(workloads) > 1:
        workloads.append(ALL_WORKLOADS)
    return [
        _row(workload, mode, replies) for workload in workloads for mode in MODES if mode in replies
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


def json_rows(all_rows: Iterable[Row]) -> list[dict[str, object]]:
    """The rows for --json."""
    return [asdict(row) for row in all_rows]


# Tokens per second by workload and mode.
_Speeds = Mapping[tuple[str, Mode], float]

# The columns in their order, and the value of a row in each. "x MODE" is the speed over that of a
# mode of the same run.
_COLUMNS: Mapping[str, Callable[[Row, _Speeds], str]] = {
    "workload": lambda row, _: row.workload,
    "mode": lambda row, _: row.mode,
    "tokens/s": lambda row, _: f"{row.tokens_per_s:.1f}",
    "x eagle3": lambda row, speeds: _gain(row, "eagle3", speeds),
    "x plain": lambda row, speeds: _gain(row, "plain", speeds),
    "cycles/1K": lambda row, _: f"{row.cycles_per_1k:.0f}",
    "accepted": lambda row, _: f"{row.mean_accepted:.2f}",
    "ms/cycle": lambda row, _: f"{row.ms_per_cycle:.1f}",
    "cache": lambda row, _: f"{row.cache_share:.0%}",
    "identical": lambda row, _: "yes" if row.outputs_identical else "NO",
}
# What a narrow terminal leaves out, the first first. Without its column a workload has a line of
# its own.
_LEFT_OUT = ("cycles/1K", "ms/cycle", "cache", "accepted", "workload", "identical")


def table(all_rows: Sequence[Row], console: Console, *, caption: str = "") -> Table:
    """The rows, in as many columns as the console has room for."""
    unlimited = console.options.update(max_width=1000)
    for num_left_out in range(len(_LEFT_OUT) + 1):
        columns = [name for name in _COLUMNS if name not in _LEFT_OUT[:num_left_out]]
        shown = _table(all_rows, columns)
        if Measurement.get(console, unlimited, shown).maximum <= console.width:
            break
    shown.caption = caption
    shown.caption_justify = "left"
    return shown


def _table(all_rows: Sequence[Row], columns: Sequence[str]) -> Table:
    speeds = {(row.workload, row.mode): row.tokens_per_s for row in all_rows}
    shown = Table(box=box.SIMPLE_HEAD, padding=0)
    for name in columns:
        is_text = name in ("workload", "mode")
        shown.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row, before, after in zip(
        all_rows, [None, *all_rows[:-1]], [*all_rows[1:], None], strict=True
    ):
        is_first = before is None or before.workload != row.workload
        if is_first and "workload" not in columns:
            shown.add_row(row.workload, style="bold")
        shown.add_row(
            *(_COLUMNS[name](row, speeds) for name in columns),
            end_section=after is not None and after.workload != row.workload,
        )
    return shown


def _gain(row: Row, over: Mode, speeds: _Speeds) -> str:
    baseline = speeds.get((row.workload, over))
    return "-" if baseline is None else f"{row.tokens_per_s / baseline:.2f}"


def differences(all_rows: Iterable[Row]) -> list[str]:
    """The modes whose text differs from plain decoding's, each with its workload."""
    return [
        f"{row.mode} on {row.workload}"
        for row in all_rows
        if not row.outputs_identical and row.workload != ALL_WORKLOADS
    ]


_NAMES: Mapping[Literal["plain", "eagle3"], str] = {"plain": "plain decoding", "eagle3": "EAGLE3"}


def meaning(all_rows: Sequence[Row], hvd: Mode) -> tuple[str, str]:
    """Two sentences: how fast HVD is on this machine, and what a GPU would change.

    hvd: the mode of HVD that they are about. It and plain must be among the rows.
    """
    last = all_rows[-1].workload  # all workloads, or the only one
    of_all = {row.mode: row for row in all_rows if row.workload == last}
    baselines: list[Literal["plain", "eagle3"]] = ["plain"]
    if "eagle3" in of_all:
        baselines = ["eagle3", "plain"]
    gains = _gains(all_rows, hvd, baselines[0])
    total, of_workloads = gains.pop(last), gains
    compared = _compared(total, baselines[0]) + _range(of_workloads)
    if len(baselines) > 1:
        over_plain = _compared(_gains(all_rows, hvd, "plain")[last], "plain")
        compared = f"{compared} and {over_plain}"
    cycles = [f"{of_all[hvd].cycles_per_1k:.0f} with HVD"]
    cycles += [f"{of_all[mode].cycles_per_1k:.0f} with {_NAMES[mode]}" for mode in baselines]
    return (
        f"On this machine HVD is {compared}.",
        "A GPU with few requests verifies many tokens in nearly the time of one, so cycles per "
        f"1,000 tokens decide there: {', '.join(cycles)}.",
    )


def _gains(all_rows: Iterable[Row], mode: Mode, over: Mode) -> dict[str, float]:
    """Speed of a mode over another's, by workload."""
    speeds = {(row.workload, row.mode): row.tokens_per_s for row in all_rows}
    return {
        workload: speed / speeds[workload, over]
        for (workload, of), speed in speeds.items()
        if of == mode
    }


def _compared(gain: float, over: Literal["plain", "eagle3"]) -> str:
    if round(gain, 2) == 1:
        return f"as fast as {_NAMES[over]}"
    slower = "only " if gain < 1 else ""
    return f"{slower}{gain:.2f}x as fast as {_NAMES[over]}"


def _range(gains: Mapping[str, float]) -> str:
    """The workloads of the smallest and the largest gain."""
    if not gains:
        return ""
    low, high = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    loses = ", where it loses," if round(gains[low], 2) < 1 else ""
    return f" ({gains[low]:.2f}x on {low}{loses} to {gains[high]:.2f}x on {high})"
