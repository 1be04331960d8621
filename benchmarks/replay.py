"""What each policy makes of recorded generations under tables of costs, at several batch sizes.

    python -m benchmarks.replay --traces DIR --tokenizer FILE --costs FILE... [--json FILE]

Sessions that the shipped predictor was trained on fill the shared cache and are not counted. The
model drafter is simulated (sglang_hvd/replay/model_drafter.py). Its tree has the size and number of
steps that are best for policy `model` at that batch size, for all policies but `allocate`, which
chooses them itself. "fixed" is the best of --thresholds for policy `payoff`; the oracle allocates
like `allocate`, and knows what each draft will bring.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

import numpy as np
from tqdm import tqdm

from sglang_hvd.allocation import StepAllocator, StepCosts
from sglang_hvd.config import CacheMode, HvdConfig, Policy
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import DEFAULT_PREDICTORS, PayoffPredictor
from sglang_hvd.replay.batch import BatchReplay, DrawnTrace
from sglang_hvd.replay.model_drafter import ODDS_RATIOS, ModelDrafter
from sglang_hvd.replay.recordings import (
    Recording,
    Vocabulary,
    find_recordings,
    session_fingerprints,
)
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.trace import Trace

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
MODEL_SIZES = (3, 7, 15, 31)
MODEL_STEPS = (2, 4, 6, 8)
# Trees of policy `model` to choose from: nodes and steps.
MODEL_SHAPES = ((3, 2), (7, 4), (15, 4), (15, 6), (31, 6), (31, 8))

STRENGTHS = {"weak": 0.75, "usual": 2.7, "strong": 4.2}


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy as it is run. name: in the rows."""

    name: str
    policy: Policy
    threshold: float | None = None
    is_oracle: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """tokens_per_ms: of the whole batch. regret_to_oracle: share of the oracle's speed that is
    missing. speedup_vs_model: speed over that of policy `model`."""

    file: str
    family: str
    costs: str
    batch_size: int
    model_drafter: str
    policy: str
    tokens_per_ms: float
    cycles_per_1k: float
    mean_accepted: float
    cache_share: float
    both_share: float
    speedup_vs_model: float = 1.0
    regret_to_oracle: float = 0.0


@dataclass(frozen=True)
class Job:
    """One recording under one drafter, table and batch size, with all contestants."""

    recording: Recording
    costs_name: str
    costs: StepCosts
    batch_size: int
    drafter_name: str
    model_drafter: ModelDrafter
    contestants: tuple[Contestant, ...]
    shapes: tuple[tuple[int, int], ...]
    cache_mode: CacheMode
    num_tokens: int


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    thresholds = tuple(options.thresholds)
    contestants = (
        Contestant("plain", "cache"),  # with a cache that proposes nothing
        Contestant("cache", "cache"),
        Contestant("model", "model"),
        Contestant("frequency", "frequency"),
        Contestant("payoff", "payoff"),
        *(Contestant(f"payoff {t:g}", "payoff", t) for t in thresholds),
        Contestant("always-both", "both"),
        Contestant("allocate", "allocate"),
        Contestant("oracle", "allocate", is_oracle=True),
    )
    drafters = {
        f"{strength}, {kind}": ModelDrafter(STRENGTHS[strength], ODDS_RATIOS[kind])
        for strength in options.strengths
        for kind in options.kinds
    }
    recordings = find_recordings(options.traces)
    vocabulary = Vocabulary(options.tokenizer, options.eos_token)
    tables = {path.stem: StepCosts.load(path) for path in options.costs}
    cells = [
        (name, costs, batch_size, drafter_name, drafter)
        for name, costs in tables.items()
        for batch_size in options.batch_sizes
        for drafter_name, drafter in drafters.items()
    ]
    rows: list[Row] = []
    with ProcessPoolExecutor(
        options.processes,
        mp_context=get_context("spawn"),
        initializer=_set_up,
        initargs=(vocabulary,),
    ) as pool:
        for name, costs, batch_size, drafter_name, drafter in tqdm(cells, unit="cell"):
            jobs = [
                Job(
                    recording,
                    name,
                    costs,
                    batch_size,
                    drafter_name,
                    drafter,
                    contestants,
                    tuple(MODEL_SHAPES),
                    options.cache_mode,
                    options.tokens,
                )
                for recording in recordings
            ]
            shape = _best_shape(pool.map(_try_shapes, jobs))
            found = pool.map(_run, jobs, [shape] * len(jobs))
            of_cell = [row for of_file in found for row in of_file]
            rows += of_cell
            print(f"\n{name}, batch size {batch_size}, model drafter {drafter_name}: its tree has ")
            print(f"{shape[0]} nodes in {shape[1]} steps\n")
            print(_table(of_cell), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


_vocabulary: Vocabulary


def _set_up(vocabulary: Vocabulary) -> None:
    global _vocabulary
    _vocabulary = vocabulary


def _sessions(job: Job) -> tuple[str, list[Trace], list[list[DrawnTrace]]]:
    """The family, what the predictor was trained on, and the other sessions."""
    traces = job.recording.traces(_vocabulary)
    trained_on = PayoffPredictor.load(DEFAULT_PREDICTORS[job.cache_mode]).trained_sessions
    fingerprints = session_fingerprints(traces)
    sizes = sorted({*MODEL_SIZES, *(nodes for nodes, _ in job.shapes)})
    accepted = job.model_drafter.accepted_by_size(
        traces, HvdConfig(cache_mode=job.cache_mode), sizes
    )
    earlier: list[Trace] = []
    sessions: dict[str, list[DrawnTrace]] = {}
    for place, trace in enumerate(traces):
        if fingerprints[trace.session] in trained_on:
            earlier.append(trace)
        else:
            drawn = DrawnTrace(trace, {size: accepted[size][place] for size in sizes})
            sessions.setdefault(trace.session, []).append(drawn)
    return traces[0].family, earlier, list(sessions.values())


def _try_shapes(job: Job) -> tuple[str, list[float]] | None:
    """Tokens per millisecond of policy `model` with each shape."""
    family, earlier, sessions = _sessions(job)
    if not sessions:
        return None
    speeds = []
    for shape in job.shapes:
        row = _serve(job, Contestant("model", "model"), shape, family, earlier, sessions)
        speeds.append(row.tokens_per_ms)
    return family, speeds


def _run(job: Job, shape: tuple[int, int]) -> list[Row]:
    family, earlier, sessions = _sessions(job)
    if not sessions:
        return []
    rows = [_serve(job, c, shape, family, earlier, sessions) for c in job.contestants]
    return _beside_oracle(rows)


def _beside_oracle(rows: Sequence[Row]) -> list[Row]:
    speed = {row.policy: row.tokens_per_ms for row in rows}
    return [
        Row(
            **{
                **asdict(row),
                "speedup_vs_model": row.tokens_per_ms / speed["model"],
                "regret_to_oracle": 1 - row.tokens_per_ms / speed["oracle"],
            }
        )
        for row in rows
    ]


def _serve(
    job: Job,
    contestant: Contestant,
    shape: tuple[int, int],
    family: str,
    earlier: Sequence[Trace],
    sessions: Sequence[Sequence[DrawnTrace]],
) -> Row:
    config = HvdConfig(
        policy=contestant.policy,
        cache_mode=job.cache_mode,
        threshold=contestant.threshold,
        calibrate=not contestant.is_oracle,
        max_draft_tokens=WIDTHS[-1] - 1,
    )
    is_plain = contestant.name == "plain"
    num_nodes, num_steps = shape
    allocator = None
    if contestant.policy == "allocate":
        num_nodes, num_steps = MODEL_SIZES[-1], MODEL_STEPS[-1]
        allocator = StepAllocator(
            job.costs, widths=WIDTHS, model_sizes=MODEL_SIZES, num_steps=MODEL_STEPS
        )
    drafter = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=PayoffPredictor.of_config(config) if config.predicts else None,
        token_classes=_vocabulary.token_classes if config.predicts else None,
        num_model_steps=num_steps,
        num_model_nodes=num_nodes,
        verify_width=1 if is_plain else _verify_width(contestant, num_nodes),
        allocator=allocator,
    )
    replay = BatchReplay(
        drafter,
        job.costs,
        widths=WIDTHS,
        drafts_with_model=config.drafts_with_model,
        is_oracle=contestant.is_oracle,
        model_sizes=MODEL_SIZES,
        num_model_steps=num_steps,
    )
    totals = replay.serve(
        sessions, earlier=earlier, batch_size=job.batch_size, num_tokens=job.num_tokens
    )
    num_drafted = totals.num_cache + totals.num_model + totals.num_both
    return Row(
        file=job.recording.name,
        family=family,
        costs=job.costs_name,
        batch_size=job.batch_size,
        model_drafter=job.drafter_name,
        policy=contestant.name,
        tokens_per_ms=totals.num_tokens / totals.ms,
        cycles_per_1k=1000 * totals.num_cycles / totals.num_tokens,
        mean_accepted=totals.num_accepted / num_drafted if num_drafted else 0.0,
        cache_share=totals.num_cache / totals.num_cycles,
        both_share=totals.num_both / totals.num_cycles,
    )


def _verify_width(contestant: Contestant, num_nodes: int) -> int:
    if contestant.policy in ("allocate", "both"):
        return WIDTHS[-1]
    return max(32, num_nodes + 1)


def _best_shape(tried: Iterable[tuple[str, list[float]] | None]) -> tuple[int, int]:
    """By the mean over families of the speed relative to the first."""
    families: dict[str, list[np.ndarray]] = {}
    for found in tried:
        if found is not None:
            family, speeds = found
            families.setdefault(family, []).append(np.array(speeds) / speeds[0])
    means = np.mean([np.mean(speeds, axis=0) for speeds in families.values()], axis=0)
    return MODEL_SHAPES[int(means.argmax())]


def _table(rows: Sequence[Row]) -> str:
    """Means over the families, relative to policy `model`."""
    lines = [
        "| policy | tokens/ms over model | regret to oracle | cycles per 1K | cache | both |",
        "|---|---|---|---|---|---|",
    ]
    for policy in dict.fromkeys(row.policy for row in rows):
        families: dict[str, list[Row]] = {}
        for row in rows:
            if row.policy == policy:
                families.setdefault(row.family, []).append(row)
        means = [
            np.mean([np.mean([getattr(r, name) for r in rs]) for rs in families.values()])
            for name in (
                "speedup_vs_model",
                "regret_to_oracle",
                "cycles_per_1k",
                "cache_share",
                "both_share",
            )
        ]
        lines.append(
            f"| {policy} | {means[0]:.3f} | {means[1]:.3f} | {means[2]:.0f} | {means[3]:.2f} "
            f"| {means[4]:.2f} |"
        )
    return "\n".join(lines)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Policies under tables of costs.")
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--eos-token", default="<|im_end|>")
    parser.add_argument("--costs", type=Path, nargs="+", required=True)
    parser.add_argument("--cache-mode", choices=get_args(CacheMode), default="votes")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--strengths", choices=STRENGTHS, nargs="+", default=["usual"])
    kinds = [kind for kind, ratio in ODDS_RATIOS.items() if ratio is not None]
    parser.add_argument("--kinds", choices=kinds, nargs="+", default=kinds)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1, 2, 3, 4.5, 6])
    parser.add_argument(
        "--tokens", type=int, default=20_000, help="most tokens to measure per file and policy"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
