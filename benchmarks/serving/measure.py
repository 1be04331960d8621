"""Measures several modes of serving in turn: a row for each mode, workload and concurrency."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from tqdm import tqdm

from benchmarks.serving.client import Answer, Conversation, Played, play
from sglang_hvd.demo.server import flush_cache
from sglang_hvd.replay.training.tables import markdown_table


@dataclass(frozen=True, slots=True)
class Row:
    """Speeds and host times are medians over the rounds. All other figures combine all rounds.

    num_sessions: number of sessions played; it may differ between concurrencies.
    tokens_per_s_spread: largest minus smallest of the rounds; None for a single round.
    speedup_vs_plain, speedup_vs_eagle3: median over the rounds of the ratio within a round; None
        if that mode did not run.
    cycles_per_1k: decoding cycles per 1000 generated tokens. Prefill generates each reply's first
        token.
    ms_per_cycle: request time per cycle, prefill included. None, as mean_accepted and cache_share,
        if prefills generated all tokens.
    mean_accepted: accepted draft tokens per cycle. Bonus tokens and tokens after a reply's end do
        not count.
    cache_share: share of the cycles that verified a cache draft, alone or in one tree with the
        model drafter's draft.
    ttft_ms_p50: time to the first chunk of a reply.
    itl_ms_p99: time between tokens; the tokens of a chunk count as evenly spaced. None if each
        reply came in one chunk.
    host_us_per_step: see Played.
    outputs_identical: every reply is the expected one, token for token.
    """

    workload: str
    family: str
    mode: str
    concurrency: int
    num_sessions: int
    tokens_per_s: float
    tokens_per_s_spread: float | None
    speedup_vs_plain: float | None
    speedup_vs_eagle3: float | None
    cycles_per_1k: float
    ms_per_cycle: float | None
    mean_accepted: float | None
    cache_share: float | None
    ttft_ms_p50: float
    itl_ms_p99: float | None
    host_us_per_step: float | None
    outputs_identical: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload at one concurrency, which is measured in each mode.

    is_expected: whether an answer is the one that every mode must give.
    """

    workload: str
    family: str
    concurrency: int
    conversations: Sequence[Conversation]
    is_expected: Callable[[Answer], bool]


def measure(
    urls: Mapping[str, str],
    cells: Sequence[Cell],
    *,
    rounds: int,
    warm_up: bool = True,
    first_turn: int = 0,
) -> list[Row]:
    """Plays every cell on every server, `rounds` times.

    urls: URLs of the servers by mode. The servers take turns, in another order each time, so that
        other load on the machine affects all of them alike. Their caches are flushed before each
        measurement.
    warm_up: an additional first round is not counted.
    first_turn: index of the mode that starts. Calls for single cells should pass another one each.
    """
    modes = list(urls)
    found: dict[tuple[int, str], list[Played]] = {}
    with tqdm(total=len(cells) * len(modes) * (rounds + warm_up), unit="run", disable=None) as bar:
        for number in range(rounds + warm_up):
            for place, cell in enumerate(cells):
                turn = (number + place + first_turn) % len(modes)
                for mode in [*modes[turn:], *modes[:turn]]:
                    flush_cache(urls[mode])
                    played = play(urls[mode], cell.conversations, concurrency=cell.concurrency)
                    bar.update()
                    if number >= warm_up:
                        found.setdefault((place, mode), []).append(played)
    return [
        _row(cell, mode, {mode: found[place, mode] for mode in modes})
        for place, cell in enumerate(cells)
        for mode in modes
    ]


def _row(cell: Cell, mode: str, found: Mapping[str, Sequence[Played]]) -> Row:
    rounds = found[mode]
    speeds = np.array([_speed(played) for played in rounds])
    answers = [answer for played in rounds for answer in played.answers]
    num_tokens = sum(answer.num_tokens for answer in answers)
    num_cycles = sum(answer.counts.num_cycles for answer in answers)
    gaps = [gap for answer in answers for gap in answer.gaps]
    hosts = [p.host_us_per_step for p in rounds if p.host_us_per_step is not None]

    def of_cycle(total: float) -> float | None:
        return total / num_cycles if num_cycles else None

    def speedup(over: str) -> float | None:
        if over not in found:
            return None
        return float(np.median(speeds / np.array([_speed(played) for played in found[over]])))

    return Row(
        workload=cell.workload,
        family=cell.family,
        mode=mode,
        concurrency=cell.concurrency,
        num_sessions=len(cell.conversations),
        tokens_per_s=float(np.median(speeds)),
        tokens_per_s_spread=float(np.ptp(speeds)) if len(speeds) > 1 else None,
        speedup_vs_plain=speedup("plain"),
        speedup_vs_eagle3=speedup("eagle3"),
        cycles_per_1k=1000 * num_cycles / num_tokens,
        ms_per_cycle=of_cycle(1000 * sum(answer.seconds for answer in answers)),
        mean_accepted=of_cycle(sum(answer.counts.num_accepted for answer in answers)),
        cache_share=of_cycle(sum(answer.counts.num_cache_cycles for answer in answers)),
        ttft_ms_p50=1000 * float(np.median([answer.ttft for answer in answers])),
        itl_ms_p99=1000 * float(np.quantile(gaps, 0.99)) if gaps else None,
        host_us_per_step=float(np.median(hosts)) if hosts else None,
        outputs_identical=all(map(cell.is_expected, answers)),
    )


def _speed(played: Played) -> float:
    return sum(answer.num_tokens for answer in played.answers) / played.seconds


def table_of(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    columns = {
        "workload": "workload",
        "mode": "mode",
        "concurrency": "at once",
        "tokens_per_s": "tokens/s",
        "tokens_per_s_spread": "spread",
        "speedup_vs_plain": "x plain",
        "speedup_vs_eagle3": "x EAGLE3",
        "cycles_per_1k": "cycles per 1K",
        "mean_accepted": "accepted",
        "cache_share": "cache",
        "ttft_ms_p50": "TTFT ms",
        "itl_ms_p99": "ITL p99 ms",
        "host_us_per_step": "host us",
        "outputs_identical": "identical",
    }
    return markdown_table(columns, map(asdict, rows), num_labels=2, digits=2)
