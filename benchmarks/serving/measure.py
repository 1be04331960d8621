"""Measures several modes of serving in turn: a row for each mode, workload and concurrency, and for
each phase of traffic that changes."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from tqdm import tqdm

from benchmarks.serving.client import Answer, Conversation, Played, arrivals, play
from sglang_hvd.demo.server import ServerFailed, flush_cache
from sglang_hvd.replay.training.tables import markdown_table


@dataclass(frozen=True, slots=True)
class Row:
    """Speeds and host times are medians over the rounds. All other figures combine all rounds, and
    are None if there was no round.

    concurrency: conversations at a time. With a rate: the number of all conversations.
    rate: conversations that arrive per second; None in a closed loop.
    phase: see Cell.
    num_rounds: rounds that were played to the end. If the server ended, they are fewer than those
        of other modes, and is_complete is False.
    fault: why rounds are missing, in one line; None if none are.
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
    ttft_ms_p50, ttft_ms_p90, ttft_ms_p99: time to the first chunk of a reply.
    tpot_ms_p50, tpot_ms_p90, tpot_ms_p99: mean time per token of a reply after its first chunk.
        None, as the times between tokens, if each reply came in one chunk.
    itl_ms_p50, itl_ms_p90, itl_ms_p99: time between tokens; the tokens of a chunk count as evenly
        spaced.
    goodput_per_s: replies per second that keep the bounds; median over the rounds. None without
        bounds.
    good_share: share of the replies that keep the bounds. None without bounds.
    host_us_per_step: see Played.
    outputs_identical: every reply is the expected one, token for token. None if there was none.
    """

    workload: str
    family: str
    mode: str
    concurrency: int
    rate: float | None
    phase: int | None
    num_sessions: int
    num_rounds: int
    is_complete: bool
    fault: str | None
    tokens_per_s: float | None
    tokens_per_s_spread: float | None
    speedup_vs_plain: float | None
    speedup_vs_eagle3: float | None
    cycles_per_1k: float | None
    ms_per_cycle: float | None
    mean_accepted: float | None
    cache_share: float | None
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None
    ttft_ms_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p90: float | None
    tpot_ms_p99: float | None
    itl_ms_p50: float | None
    itl_ms_p90: float | None
    itl_ms_p99: float | None
    goodput_per_s: float | None
    good_share: float | None
    host_us_per_step: float | None
    outputs_identical: bool | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """The latencies that a good reply keeps, in milliseconds; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def keeps(self, answer: Answer) -> bool:
        """Whether a reply keeps them. A reply in one chunk has no time per token to exceed."""
        is_slow = self.ttft_ms is not None and 1000 * answer.ttft > self.ttft_ms
        takes = answer.tpot
        is_slower = self.tpot_ms is not None and takes is not None and 1000 * takes > self.tpot_ms
        return not (is_slow or is_slower)


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload at one concurrency or rate, which is measured in each mode.

    is_expected: whether an answer is the one that every mode must give.
    rate: as in Row.
    phase: 1 for the first phase of traffic that changes, 2 for the cell after it, and so on. A
        server plays the phases one after the other, and its caches keep what the phases before
        left. None: a cell of its own.
    """

    workload: str
    family: str
    concurrency: int
    conversations: Sequence[Conversation]
    is_expected: Callable[[Answer], bool]
    rate: float | None = None
    phase: int | None = None


def measure(
    urls: Mapping[str, str],
    cells: Sequence[Cell],
    *,
    rounds: int,
    warm_up: bool = True,
    first_turn: int = 0,
    bounds: Bounds | None = None,
    seed: int = 0,
    unserved: Mapping[str, str] | None = None,
) -> list[Row]:
    """Plays every cell on every server, `rounds` times. Each cell has a row for each mode.

    If a server fails, a line on stderr says so, and the others go on. The rows of its mode combine
    the rounds until then.

    urls: URLs of the servers by mode. The servers take turns, in another order each time, so that
        other load on the machine affects all of them alike. Their caches are flushed before each
        cell, but not between phases.
    warm_up: an additional first round is not counted.
    first_turn: index of the mode that starts. Calls for single cells should pass another one each.
    bounds: of good replies; None: no goodput.
    seed: of the arrivals. All modes have the same arrivals, other ones in each round.
    unserved: modes without a server, and why; their rows have no figures.

    Raises ServerFailed, or OSError, if every server failed before it had played a round.
    """
    modes = list(urls)
    faults = dict(unserved or {})
    found: dict[tuple[int, str], list[Played]] = {}
    runs = _runs(cells)
    with tqdm(total=len(cells) * len(modes) * (rounds + warm_up), unit="run", disable=None) as bar:
        for number in range(rounds + warm_up):
            for index, places in enumerate(runs):
                turn = (number + index + first_turn) % len(modes)
                for mode in [*modes[turn:], *modes[:turn]]:
                    bar.update(len(places))
                    if mode in faults:
                        continue
                    try:
                        flush_cache(urls[mode])
                        for place in places:
                            played = _play(urls[mode], cells[place], seed=seed + number)
                            if number >= warm_up:
                                found.setdefault((place, mode), []).append(played)
                    except (ServerFailed, OSError) as error:
                        faults[mode] = " ".join(str(error).split())
                        if not found and faults.keys() >= urls.keys():
                            raise
                        print(f"{mode} has ended: {faults[mode]}", file=sys.stderr)
    rows = []
    for place, cell in enumerate(cells):
        of_cell = {mode: found.get((place, mode), []) for mode in (*modes, *(unserved or {}))}
        for mode, of_mode in of_cell.items():
            fault = faults.get(mode) if len(of_mode) < rounds else None
            rows.append(_row(cell, mode, of_cell, bounds=bounds, rounds=rounds, fault=fault))
    return rows


def _runs(cells: Sequence[Cell]) -> list[list[int]]:
    """The places of the cells, those of one run's phases together."""
    runs: list[list[int]] = []
    for place, cell in enumerate(cells):
        if cell.phase is None or cell.phase == 1:
            runs.append([])
        runs[-1].append(place)
    return runs


def _play(url: str, cell: Cell, *, seed: int) -> Played:
    starts = None
    if cell.rate is not None:
        starts = arrivals(len(cell.conversations), cell.rate, seed)
    return play(url, cell.conversations, concurrency=cell.concurrency, starts=starts)


def _row(
    cell: Cell,
    mode: str,
    found: Mapping[str, Sequence[Played]],
    *,
    bounds: Bounds | None,
    rounds: int,
    fault: str | None,
) -> Row:
    played_rounds = found[mode]
    speeds = [_speed(played) for played in played_rounds]
    answers = [answer for played in played_rounds for answer in played.answers]
    num_tokens = sum(answer.num_tokens for answer in answers)
    num_cycles = sum(answer.counts.num_cycles for answer in answers)
    gaps = [gap for answer in answers for gap in answer.gaps]
    hosts = [p.host_us_per_step for p in played_rounds if p.host_us_per_step is not None]

    def of_cycle(total: float) -> float | None:
        return total / num_cycles if num_cycles else None

    def speedup(over: str) -> float | None:
        # A server that ended has fewer rounds.
        pairs = zip(played_rounds, found.get(over, ()), strict=False)
        return _median([_speed(mine) / _speed(others) for mine, others in pairs])

    def quantiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
        return {
            f"{name}_ms_p{percent}": 1000 * float(np.quantile(seconds, percent / 100))
            if seconds
            else None
            for percent in (50, 90, 99)
        }

    times = {
        **quantiles("ttft", [answer.ttft for answer in answers]),
        **quantiles("tpot", [takes for answer in answers if (takes := answer.tpot) is not None]),
        **quantiles("itl", gaps),
    }
    goodput = good_share = None
    if bounds is not None and answers:
        good = [sum(map(bounds.keeps, played.answers)) for played in played_rounds]
        goodput = _median([n / p.seconds for n, p in zip(good, played_rounds, strict=True)])
        good_share = sum(good) / len(answers)

    return Row(
        workload=cell.workload,
        family=cell.family,
        mode=mode,
        concurrency=cell.concurrency,
        rate=cell.rate,
        phase=cell.phase,
        num_sessions=len(cell.conversations),
        num_rounds=len(played_rounds),
        is_complete=len(played_rounds) == rounds,
        fault=fault,
        tokens_per_s=_median(speeds),
        tokens_per_s_spread=float(np.ptp(speeds)) if len(speeds) > 1 else None,
        speedup_vs_plain=speedup("plain"),
        speedup_vs_eagle3=speedup("eagle3"),
        cycles_per_1k=1000 * num_cycles / num_tokens if num_tokens else None,
        ms_per_cycle=of_cycle(1000 * sum(answer.seconds for answer in answers)),
        mean_accepted=of_cycle(sum(answer.counts.num_accepted for answer in answers)),
        cache_share=of_cycle(sum(answer.counts.num_cache_cycles for answer in answers)),
        **times,
        goodput_per_s=goodput,
        good_share=good_share,
        host_us_per_step=_median(hosts),
        outputs_identical=all(map(cell.is_expected, answers)) if answers else None,
    )


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _speed(played: Played) -> float:
    return sum(answer.num_tokens for answer in played.answers) / played.seconds


def table_of(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    columns = {
        "workload": "workload",
        "mode": "mode",
        "concurrency": "at once",
        "rate": "per s",
        "phase": "phase",
        "tokens_per_s": "tokens/s",
        "tokens_per_s_spread": "spread",
        "speedup_vs_plain": "x plain",
        "speedup_vs_eagle3": "x EAGLE3",
        "cycles_per_1k": "cycles per 1K",
        "mean_accepted": "accepted",
        "cache_share": "cache",
        "ttft_ms_p50": "TTFT ms",
        "ttft_ms_p99": "TTFT p99 ms",
        "tpot_ms_p50": "TPOT ms",
        "itl_ms_p99": "ITL p99 ms",
        "goodput_per_s": "good per s",
        "host_us_per_step": "host us",
        "outputs_identical": "identical",
        "is_complete": "complete",
    }
    return markdown_table(columns, map(asdict, rows), num_labels=2, digits=2)
