"""Ways of decoding side by side: throughput, latency and where tokens came from.

    python -m benchmarks.serving --modes plain,eagle3,ngram,cache,frequency,payoff,allocate
        --concurrency 1,4,16 [--json FILE]
    python -m benchmarks.serving --attach plain=URL --attach payoff=URL [--concurrency 1,4,16] ...

Each mode is a server of its own on the demo models, or one that runs already. All stay up together
and take turns, in another order each time: what the machine does meanwhile falls on all of them.
Every server's caches are flushed before each measurement. The first round is not counted.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.serving.client import Answer, Played, play
from sglang_hvd.demo.corpus.session import FAMILIES, Session
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import ensure_demo_models
from sglang_hvd.demo.modes import MODES, server_flags
from sglang_hvd.demo.server import CPU_ENVIRONMENT, CPU_FLAGS, SglangServer, flush_cache

_SEED = 11


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds.

    tokens_per_s_spread: largest less smallest of the rounds.
    speedup_vs_plain, speedup_vs_eagle3: median over the rounds of the ratio within a round; None
        where that mode did not run.
    cache_share: of the cycles, those that verified a cache draft, alone or in one tree with the
        model drafter's.
    ttft_ms_p50, itl_ms_p99: to the first chunk of a reply, and between chunks.
    ms_per_cycle: of a request, its prefill included.
    outputs_identical: every reply is that of the first mode served one at a time.
    """

    workload: str
    family: str
    mode: str
    concurrency: int
    tokens_per_s: float
    tokens_per_s_spread: float
    speedup_vs_plain: float | None
    speedup_vs_eagle3: float | None
    cycles_per_1k: float
    ms_per_cycle: float
    mean_accepted: float
    cache_share: float
    ttft_ms_p50: float
    itl_ms_p99: float
    host_us_per_step: float | None
    outputs_identical: bool


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    workloads = {
        family: demo_sessions(
            family, count=_num_sessions(max(options.concurrency), options), seed=_SEED
        )
        for family in options.workloads
    }
    with contextlib.ExitStack() as stack:
        urls = dict(options.attach) or stack.enter_context(_servers(options.modes))
        rows = _measure(urls, workloads, options)
    print(_table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.outputs_identical for row in rows) else 1


@contextlib.contextmanager
def _servers(modes: Sequence[str]) -> Iterator[dict[str, str]]:
    models = ensure_demo_models(Path.home() / ".cache" / "sglang_hvd")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {}
        for mode in modes:
            flags = [*CPU_FLAGS, *server_flags(mode, models)]  # type: ignore[arg-type]
            server = SglangServer(
                flags, log_file=folder / f"{mode}.log", environment=CPU_ENVIRONMENT
            )
            urls[mode] = stack.enter_context(server).url
        yield urls


def _measure(
    urls: Mapping[str, str], workloads: Mapping[str, Sequence[Session]], options: argparse.Namespace
) -> list[Row]:
    modes = list(urls)
    cells = [(name, c) for name in workloads for c in options.concurrency]
    found: dict[tuple[str, int, str], list[Played]] = {}
    references = {
        name: play(urls[modes[0]], sessions, concurrency=1, max_tokens=options.max_tokens)
        for name, sessions in workloads.items()
    }
    with tqdm(total=len(cells) * len(modes) * (options.rounds + 1), unit="run") as bar:
        for number in range(options.rounds + 1):
            for place, (name, concurrency) in enumerate(cells):
                turn = (number + place) % len(modes)
                for mode in [*modes[turn:], *modes[:turn]]:
                    flush_cache(urls[mode])
                    played = play(
                        urls[mode],
                        workloads[name][: _num_sessions(concurrency, options)],
                        concurrency=concurrency,
                        max_tokens=options.max_tokens,
                    )
                    bar.update()
                    if number > 0:  # else: warm-up
                        found.setdefault((name, concurrency, mode), []).append(played)
    return [
        _row(name, concurrency, mode, found, references[name].answers)
        for name, concurrency in cells
        for mode in modes
    ]


def _row(
    name: str,
    concurrency: int,
    mode: str,
    found: Mapping[tuple[str, int, str], Sequence[Played]],
    reference: Sequence[Answer],
) -> Row:
    rounds = found[name, concurrency, mode]
    speeds = np.array([_speed(played) for played in rounds])
    answers = [answer for played in rounds for answer in played.answers]
    num_tokens = sum(answer.num_tokens for answer in answers)
    num_cycles = sum(answer.num_cycles for answer in answers)
    gaps = [gap for answer in answers for gap in answer.gaps]
    hosts = [p.host_us_per_step for p in rounds if p.host_us_per_step is not None]

    def speedup(over: str) -> float | None:
        others = found.get((name, concurrency, over))
        if others is None:
            return None
        return float(np.median(speeds / np.array([_speed(played) for played in others])))

    return Row(
        workload=name,
        family=name,
        mode=mode,
        concurrency=concurrency,
        tokens_per_s=float(np.median(speeds)),
        tokens_per_s_spread=float(np.ptp(speeds)),
        speedup_vs_plain=speedup("plain"),
        speedup_vs_eagle3=speedup("eagle3"),
        cycles_per_1k=1000 * num_cycles / num_tokens,
        ms_per_cycle=1000 * sum(answer.seconds for answer in answers) / num_cycles,
        mean_accepted=sum(answer.num_accepted for answer in answers) / num_cycles,
        cache_share=sum(answer.num_cache_cycles for answer in answers) / num_cycles,
        ttft_ms_p50=1000 * float(np.median([answer.ttft for answer in answers])),
        itl_ms_p99=1000 * float(np.quantile(gaps, 0.99)) if gaps else 0.0,
        host_us_per_step=float(np.median(hosts)) if hosts else None,
        outputs_identical=all(_is_identical(played, reference) for played in rounds),
    )


def _speed(played: Played) -> float:
    return sum(answer.num_tokens for answer in played.answers) / played.seconds


def _is_identical(played: Played, reference: Sequence[Answer]) -> bool:
    texts = {(answer.session, answer.turn): answer.text for answer in reference}
    return all(texts[answer.session, answer.turn] == answer.text for answer in played.answers)


def _num_sessions(concurrency: int, options: argparse.Namespace) -> int:
    """Enough that each place is filled again: at the end of a run places stay empty."""
    return max(options.sessions, 2 * concurrency)


def _table(rows: Sequence[Row]) -> str:
    columns = {
        "workload": "workload",
        "concurrency": "at once",
        "mode": "mode",
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
    lines = [f"| {' | '.join(columns.values())} |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append(f"| {' | '.join(_cell(getattr(row, name)) for name in columns)} |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ways of decoding, side by side.")
    parser.add_argument("--modes", type=_modes, default=list(MODES), help=",".join(MODES))
    parser.add_argument(
        "--attach",
        type=_attached,
        action="append",
        default=[],
        metavar="MODE=URL",
        help="a server that runs already, instead of --modes; may be repeated",
    )
    parser.add_argument("--concurrency", type=_numbers, default=[1, 4, 16])
    parser.add_argument("--workloads", type=_workloads, default=list(FAMILIES))
    parser.add_argument(
        "--sessions",
        type=int,
        default=8,
        help="of each workload, at least; twice the concurrency if that is more",
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="of each reply")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def _modes(text: str) -> list[str]:
    return _among(text, MODES)


def _workloads(text: str) -> list[str]:
    return _among(text, FAMILIES)


def _among(text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(known)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _attached(text: str) -> tuple[str, str]:
    mode, _, url = text.partition("=")
    if not url:
        raise argparse.ArgumentTypeError(f"{text}: give MODE=URL")
    return mode, url.rstrip("/")


if __name__ == "__main__":
    sys.exit(main())
