"""What each policy makes of recorded generations under tables of costs, at several batch sizes.

    python -m benchmarks.replay --traces DIR --tokenizer FILE --costs FILE... [--json FILE]

Sessions that the shipped predictor was trained on fill the shared cache and are not counted. The
model drafter is simulated (sglang_hvd/replay/model_drafter.py). Each policy but `allocate` is run
with several settings, and the rows are of the one that is best for all files at that batch size,
with the first seed: the size of the model drafter's tree for `model`, which the others then take,
the widest verification for them, and the threshold for "payoff fixed". A step is as wide as its
drafts need.

`allocate` chooses all of that itself, up to 64 nodes; "allocate, width 32" up to as many as a
server has by default for more than two requests. "allocate, one tree" cannot choose the number of
steps: it has the tree of `model` or smaller ones, as a server without room for drafts of fewer
steps; and the cache drafts of "allocate, chains" do not branch. A draft of few steps costs as many
nodes as one of all, more than a server's has: that speaks against `allocate`. The oracle allocates
like `allocate` and knows what each draft will bring; "oracle, one tree" likewise. "knows cache
drafts" predicts the model drafter's as `allocate` does, "knows model drafts" the other way round.
Regret is to the oracle.

With several seeds everything is served as often, each time with another draw of the model drafter,
from other places of the texts; rows are of all together.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from benchmarks.command import add_json, run, write_rows
from sglang_hvd.allocation import OWN_PACE, StepAllocator, StepCosts, draft_step_choices
from sglang_hvd.config import (
    DEFAULT_VERIFY_WIDTH,
    PAPER_THRESHOLD,
    CacheMode,
    HvdConfig,
    Policy,
)
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import DEFAULT_PREDICTORS, SIZE_EFFECT, PayoffPredictor
from sglang_hvd.replay.batch import ORACLE, BatchReplay, DrawnTrace
from sglang_hvd.replay.evaluate import NOTHING_LEFT
from sglang_hvd.replay.model_drafter import (
    ODDS_RATIOS,
    STRENGTHS,
    ModelDrafter,
    copied_tokens,
)
from sglang_hvd.replay.plan_costs import PlanCosts
from sglang_hvd.replay.recordings import Recording, find_recordings, session_fingerprints
from sglang_hvd.replay.totals import CycleTotals
from sglang_hvd.replay.trace_tokenizer import TraceTokenizer
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import DraftSource

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
MODEL_SIZES = (3, 7, 15, 31)
MODEL_STEPS = draft_step_choices(8)
# Trees of policy `model` to choose from: nodes and steps.
MODEL_TREES = ((3, 2), (7, 4), (15, 4), (15, 6), (31, 6), (31, 8))
# Room for all that is served: a batch repeats a recording, and its copies must not push its texts
# out of the shared cache.
_CACHE_TOKENS = 2**28


@dataclass(frozen=True, slots=True)
class Setting:
    """How a policy is run.

    tree: nodes and steps of the model drafter's draft.
    width: of the widest verification.
    knows: the drafts of which it is known what they will bring.
    picks_nodes: then the right nodes of a cache draft alone are verified.
    is_flexible: `allocate` may choose the number of steps too.
    has_branches: its cache drafts may branch.
    """

    policy: Policy
    tree: tuple[int, int]
    width: int = WIDTHS[-1]
    threshold: float | None = None
    knows: frozenset[DraftSource] = frozenset()
    picks_nodes: bool = False
    is_flexible: bool = False
    has_branches: bool = True

    def __str__(self) -> str:
        parts = [f"tree {self.tree[0]} x {self.tree[1]}", f"width {self.width}"]
        if self.threshold is not None:
            parts.append(f"threshold {self.threshold:g}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Row:
    """tokens_per_ms: of the whole batch. seed_spread: between the fastest and the slowest seed, as
    a share of it. regret_to_oracle: share of the oracle's speed that is missing. speedup_vs_model:
    speed over that of policy `model`."""

    file: str
    family: str
    costs: str
    batch_size: int
    model_drafter: str
    policy: str
    setting: str
    tokens_per_ms: float
    cycles_per_1k: float
    mean_accepted: float
    cache_share: float
    both_share: float
    seed_spread: float
    speedup_vs_model: float = 1.0
    regret_to_oracle: float = 0.0


@dataclass(frozen=True)
class Job:
    """One recording under one drafter, table and batch size."""

    recording: Recording
    costs_name: str
    costs: StepCosts
    batch_size: int
    drafter_name: str
    model_drafter: ModelDrafter
    cache_mode: CacheMode
    num_tokens: int
    num_seeds: int
    postpones_extend: bool
    own_pace: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    drafters = {
        f"{strength}, {kind}": ModelDrafter(
            STRENGTHS[strength],
            ODDS_RATIOS[kind],
            size_effect=options.size_effect,
            spread=options.spread,
        )
        for strength in options.strengths
        for kind in options.kinds
    }
    recordings = find_recordings(options.traces)
    tokenizer = TraceTokenizer(options.tokenizer, options.eos_token or None)
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
        initargs=(tokenizer,),
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
                    options.cache_mode,
                    max(options.tokens, options.tokens_per_request * batch_size),
                    options.seeds,
                    options.postpone_extend,
                    options.own_pace,
                )
                for recording in recordings
            ]
            trees = {"model": [Setting("model", tree) for tree in MODEL_TREES]}
            of_model = _best(pool, jobs, trees)
            others = _settings(of_model["model"].tree, options.thresholds)
            others = {name: others[name] for name in (*options.policies, "oracle")}
            chosen = of_model | _best(pool, jobs, others)
            of_cell = _beside_oracle(_rows(pool, jobs, {n: [chosen[n]] for n in chosen}))
            rows += of_cell
            print(f"\n{name}, batch size {batch_size}, model drafter {drafter_name}\n")
            print(_table(of_cell), flush=True)
            write_rows(options.json, map(asdict, rows))  # what there is, so far
    return 0


def _rows(
    pool: Executor, jobs: Sequence[Job], settings: Mapping[str, Sequence[Setting]]
) -> list[Row]:
    """Of each file and setting. Raises ValueError if no file has a session to serve."""
    rows = [row for of_file in pool.map(_run, jobs, [settings] * len(jobs)) for row in of_file]
    if not rows:
        raise ValueError(NOTHING_LEFT)
    return rows


def _best(
    pool: Executor, jobs: Sequence[Job], settings: Mapping[str, Sequence[Setting]]
) -> dict[str, Setting]:
    """Of each name the setting with the greatest speed with the first seed, in the mean over the
    families of the mean of their files relative to the name's first setting."""
    best = {name: of_name[0] for name, of_name in settings.items()}
    several = {name: of_name for name, of_name in settings.items() if len(of_name) > 1}
    if not several:
        return best
    rows = _rows(pool, [replace(job, num_seeds=1) for job in jobs], several)
    for name, of_name in several.items():
        families: dict[str, dict[str, list[float]]] = {str(setting): {} for setting in of_name}
        first: dict[str, float] = {}
        for row in rows:
            if row.policy == name:
                beside = row.tokens_per_ms / first.setdefault(row.file, row.tokens_per_ms)
                families[row.setting].setdefault(row.family, []).append(beside)
        best[name] = max(
            of_name,
            key=lambda setting: np.mean([np.mean(s) for s in families[str(setting)].values()]),
        )
    return best


def _settings(tree: tuple[int, int], thresholds: Sequence[float]) -> dict[str, list[Setting]]:
    """By name of the rows; of each list the best is shown."""

    def widths(policy: Policy, threshold: float | None = None) -> list[Setting]:
        # The narrowest holds what the policy always verifies.
        least = {"cache": 1, "both": tree[0] + 1}.get(policy, tree[0])
        return [Setting(policy, tree, width, threshold) for width in WIDTHS if width > least]

    return {
        "plain": [Setting("cache", tree, 1)],
        "cache": widths("cache"),
        "frequency": widths("frequency"),
        "payoff": widths("payoff"),
        "payoff 6": widths("payoff", PAPER_THRESHOLD),
        "payoff fixed": [s for threshold in thresholds for s in widths("payoff", threshold)],
        "always-both": widths("both"),
        "allocate": [Setting("allocate", tree, is_flexible=True)],
        f"allocate, width {DEFAULT_VERIFY_WIDTH}": [
            Setting("allocate", tree, DEFAULT_VERIFY_WIDTH, is_flexible=True)
        ],
        "allocate, chains": [Setting("allocate", tree, is_flexible=True, has_branches=False)],
        "allocate, one tree": [Setting("allocate", tree)],
        "oracle": [Setting("allocate", tree, knows=ORACLE, is_flexible=True)],
        "oracle, one tree": [Setting("allocate", tree, knows=ORACLE)],
        "oracle, right nodes": [
            Setting("allocate", tree, knows=ORACLE, picks_nodes=True, is_flexible=True)
        ],
        **{
            f"knows {source.value} drafts": [
                Setting("allocate", tree, knows=frozenset({source}), is_flexible=True)
            ]
            for source in (DraftSource.CACHE, DraftSource.MODEL)
        },
    }


_tokenizer: TraceTokenizer


def _set_up(tokenizer: TraceTokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer
    # What a server tells its operator of its predictor would be said of every run.
    logging.getLogger("sglang_hvd").setLevel(logging.ERROR)


def _run(job: Job, settings: Mapping[str, Sequence[Setting]]) -> list[Row]:
    """A row for each setting; none if the predictor was trained on all sessions."""
    texts = [
        _texts(job.recording, job.cache_mode, replace(job.model_drafter, seed=seed))
        for seed in range(job.num_seeds)
    ]
    if not all(of_seed.sessions for of_seed in texts):
        return []
    return [
        _row(job, name, setting, texts[0].family, [_serve(job, setting, t) for t in texts])
        for name, of_name in settings.items()
        for setting in of_name
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Texts:
    """A recording with one draw of the model drafter. earlier: what it was trained on."""

    family: str
    seed: int
    earlier: Sequence[Trace]
    sessions: Sequence[Sequence[DrawnTrace]]


@cache
def _traces(recording: Recording) -> list[Trace]:
    return recording.traces(_tokenizer)


@cache
def _copied(recording: Recording, cache_mode: CacheMode) -> Sequence[npt.NDArray[np.bool_]]:
    return copied_tokens(_traces(recording), HvdConfig(cache_mode=cache_mode))


@cache
def _texts(recording: Recording, cache_mode: CacheMode, drafter: ModelDrafter) -> _Texts:
    traces = _traces(recording)  # the same for every drafter and seed
    trained_on = PayoffPredictor.load(DEFAULT_PREDICTORS[cache_mode]).trained_sessions
    fingerprints = session_fingerprints(traces)
    sizes = sorted({*MODEL_SIZES, *(nodes for nodes, _ in MODEL_TREES)})
    accepted = drafter.accepted_by_size(
        traces,
        HvdConfig(cache_mode=cache_mode),
        sizes,
        copied=lambda: _copied(recording, cache_mode),
    )
    earlier: list[Trace] = []
    sessions: dict[str, list[DrawnTrace]] = {}
    for place, trace in enumerate(traces):
        if fingerprints[trace.session] in trained_on:
            earlier.append(trace)
            continue
        drawn = DrawnTrace(trace, {size: accepted[size][place] for size in sizes})
        if drawn.has_cycles:
            sessions.setdefault(trace.session, []).append(drawn)
    return _Texts(traces[0].family, drafter.seed, earlier, list(sessions.values()))


def _serve(job: Job, setting: Setting, texts: _Texts) -> CycleTotals:
    config = HvdConfig(
        policy=setting.policy,
        cache_mode=job.cache_mode,
        # Copies of a recording must not push each other's texts out.
        shared_cache_tokens=_CACHE_TOKENS,
        session_cache_tokens=_CACHE_TOKENS,
        threshold=setting.threshold,
        calibrate=setting.knows != ORACLE,
        branches=setting.has_branches,
    )
    num_nodes, num_steps = setting.tree
    sizes, allocator = [num_nodes], None
    if setting.policy == "allocate":
        steps = [num_steps]
        if setting.is_flexible:
            (num_nodes, num_steps), steps = MODEL_TREES[-1], list(MODEL_STEPS)
        sizes = [size for size in MODEL_SIZES if size <= num_nodes]
        allocator = StepAllocator(
            job.costs,
            widths=[width for width in WIDTHS if width <= setting.width],
            model_sizes=sizes,
            num_steps=steps,
            postpones_extend=job.postpones_extend,
            own_pace=job.own_pace,
        )
    drafter = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=PayoffPredictor.of_config(config) if config.predicts else None,
        token_classes=_tokenizer.token_classes if config.predicts else None,
        num_model_steps=num_steps,
        num_model_nodes=num_nodes,
        verify_width=setting.width,
        allocator=allocator,
    )
    replay = BatchReplay(
        drafter,
        PlanCosts(job.costs, WIDTHS, config.drafts_with_model, job.postpones_extend),
        knows=setting.knows,
        picks_nodes=setting.picks_nodes,
        model_sizes=sizes,
        num_model_steps=num_steps,
    )
    return replay.serve(
        texts.sessions,
        earlier=texts.earlier,
        batch_size=job.batch_size,
        num_tokens=job.num_tokens,
        seed=texts.seed,
    )


def _row(job: Job, name: str, setting: Setting, family: str, by_seed: list[CycleTotals]) -> Row:
    totals = sum(by_seed, CycleTotals())
    assert totals.cycles_per_1k_tokens is not None
    speeds = [of_seed.num_tokens / of_seed.ms for of_seed in by_seed]
    return Row(
        file=job.recording.name,
        family=family,
        costs=job.costs_name,
        batch_size=job.batch_size,
        model_drafter=job.drafter_name,
        policy=name,
        setting=str(setting),
        tokens_per_ms=totals.num_tokens / totals.ms,
        cycles_per_1k=totals.cycles_per_1k_tokens,
        mean_accepted=totals.mean_accepted_len or 0.0,
        cache_share=totals.cache_share or 0.0,
        both_share=totals.num_both / totals.num_cycles,
        seed_spread=(max(speeds) - min(speeds)) / (totals.num_tokens / totals.ms),
    )


def _beside_oracle(rows: Sequence[Row]) -> list[Row]:
    speed = {(row.file, row.policy): row.tokens_per_ms for row in rows}
    return [
        replace(
            row,
            speedup_vs_model=row.tokens_per_ms / speed[row.file, "model"],
            regret_to_oracle=1 - row.tokens_per_ms / speed[row.file, "oracle"],
        )
        for row in rows
    ]


def _table(rows: Sequence[Row]) -> str:
    """Means over the families, relative to policy `model`."""
    lines = [
        "| policy | setting | tokens/ms over model | regret to oracle | cycles per 1K | cache "
        "| both |",
        "|---|---|---|---|---|---|---|",
    ]
    for policy in dict.fromkeys(row.policy for row in rows):
        families: dict[str, list[Row]] = {}
        of_policy = [row for row in rows if row.policy == policy]
        for row in of_policy:
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
            f"| {policy} | {of_policy[0].setting} | {means[0]:.3f} | {means[1]:.3f} "
            f"| {means[2]:.0f} | {means[3]:.2f} | {means[4]:.2f} |"
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
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1, 2, 3, 4.5])
    parser.add_argument(
        "--size-effect",
        type=float,
        default=SIZE_EFFECT,
        help="of the simulated tree, in log odds for each doubling of its nodes; `allocate` "
        "assumes %(default)s",
    )
    parser.add_argument(
        "--spread",
        type=float,
        default=0.0,
        help="between sessions, of what the simulated drafter has right: a standard deviation in "
        "log odds (default: %(default)g)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=1_500,
        help="to measure for each file, policy and seed (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens-per-request",
        type=int,
        default=128,
        help="but no fewer than so many for each of the requests at a time (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument(
        "--postpone-extend",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="bring the model drafter's KV cache up to date for a request when it drafts, not in "
        "every step for all",
    )
    parser.add_argument(
        "--own-pace",
        type=float,
        default=OWN_PACE,
        help="how far `allocate` weighs tokens and time by the step itself, from 0, by the pace of "
        f"the latest steps, to 1 (default: {OWN_PACE})",
    )
    policies = [name for name in _settings(MODEL_TREES[-1], []) if name != "oracle"]
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=policies,
        default=policies,
        help="rows beside those of model and oracle (default: all)",
    )
    parser.add_argument("--processes", type=int, default=2)
    add_json(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(main)
