"""Serves one recording with several settings; runs in a worker process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from benchmarks.command import silence_servers
from benchmarks.replay.disturbed import DISTURBANCES, LearnedPlanCosts
from benchmarks.replay.rows import Row
from benchmarks.replay.settings import MODEL_SIZES, MODEL_STEPS, MODEL_TREES, WIDTHS, Setting
from sglang_hvd.allocation import DrafterChoices, DraftExtend, StepAllocator
from sglang_hvd.config import CacheMode, HvdConfig, PostponeExtend
from sglang_hvd.costs import StepCosts
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import DEFAULT_PREDICTORS, AcceptancePredictor
from sglang_hvd.replay.core.batch import ORACLE, BatchReplay, DrawnTrace
from sglang_hvd.replay.core.model_drafter import ModelDrafter, copied_tokens
from sglang_hvd.replay.core.recordings import Recording, TraceTokenizer, session_fingerprints
from sglang_hvd.replay.core.totals import CycleTotals, PlanCosts
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.trace import Trace

# Large enough for everything that is served. A batch repeats a recording, and the copies must not
# evict its texts from the shared cache.
_CACHE_TOKENS = 2**28


@dataclass(frozen=True)
class Job:
    """One recording with one model drafter, cost table and batch size."""

    recording: Recording
    costs_name: str
    costs: StepCosts
    batch_size: int
    drafter_name: str
    model_drafter: ModelDrafter
    cache_mode: CacheMode
    num_tokens: int
    num_seeds: int
    postpone_extend: PostponeExtend | None
    documents: Recording | None = None


_tokenizer: TraceTokenizer


def set_up_process(tokenizer: TraceTokenizer) -> None:
    """Must be called in a process before run_job."""
    global _tokenizer
    _tokenizer = tokenizer
    silence_servers()


def run_job(job: Job, settings: Mapping[str, Sequence[Setting]]) -> list[Row]:
    """A row for each setting. Empty if the predictor was trained on all sessions."""
    texts = [
        _texts(job.recording, job.cache_mode, replace(job.model_drafter, seed=seed))
        for seed in range(job.num_seeds)
    ]
    if not all(of_seed.sessions for of_seed in texts):
        return []
    return [
        _row(job, name, setting, texts[0], [_serve(job, setting, of_seed) for of_seed in texts])
        for name, of_name in settings.items()
        for setting in of_name
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Texts:
    """A recording with one draw of the model drafter.

    earlier: traces that the predictor was trained on.
    """

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
    trained_on = AcceptancePredictor.load(DEFAULT_PREDICTORS[cache_mode]).trained_sessions
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
        if drawn.num_decoded:
            sessions.setdefault(trace.session, []).append(drawn)
    return _Texts(traces[0].family, drafter.seed, earlier, list(sessions.values()))


def _serve(job: Job, setting: Setting, texts: _Texts) -> CycleTotals:
    config = HvdConfig(
        policy=setting.policy,
        cache_mode=job.cache_mode,
        shared_cache_tokens=_CACHE_TOKENS,
        session_cache_tokens=_CACHE_TOKENS,
        threshold=setting.threshold,
        calibrate=setting.knows != ORACLE,
        branches=setting.has_branches,
        postpone_extend=job.postpone_extend,
    )
    num_nodes, num_steps = setting.tree
    sizes, allocator = [num_nodes], None
    runs_ahead = setting.waits == "if it pays"
    draft_extend = DraftExtend.of(config, default="plain" if runs_ahead else "never")
    costs = job.costs
    if setting.waits == "never":
        costs = costs.model_copy(update={"wait": None})
    if setting.policy == "allocate":
        steps = [num_steps]
        if setting.is_flexible:
            (num_nodes, num_steps), steps = MODEL_TREES[-1], list(MODEL_STEPS)
        sizes = [size for size in MODEL_SIZES if size <= num_nodes]
        allocator = StepAllocator(
            costs,
            widths=[width for width in WIDTHS if width <= setting.width],
            drafters=[DrafterChoices(tuple(sizes), tuple(steps))],
            runs_ahead=runs_ahead,
            draft_extend=draft_extend,
        )
    drafter = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=AcceptancePredictor.of_config(config) if config.predicts else None,
        token_classes=_tokenizer.token_classes if config.predicts else None,
        num_model_steps=num_steps,
        num_model_nodes=num_nodes,
        verify_width=setting.width,
        allocator=allocator,
    )
    plan_costs = PlanCosts(costs, WIDTHS, draft_extend)
    if setting.disturbed is not None:
        assert allocator is not None, "only `allocate` has costs to learn"
        plan_costs = LearnedPlanCosts(
            costs,
            WIDTHS,
            draft_extend,
            disturbance=DISTURBANCES[setting.disturbed],
            allocator=allocator,
            runs_ahead=runs_ahead,
            seed=texts.seed,
        )
    replay = BatchReplay(
        drafter,
        plan_costs,
        knows=setting.knows,
        picks_nodes=setting.picks_nodes,
        model_sizes=sizes,
        num_model_steps=num_steps,
        runs_ahead=runs_ahead,
    )

    def serve(texts: _Texts) -> CycleTotals:
        return replay.serve(
            texts.sessions,
            earlier=texts.earlier,
            batch_size=job.batch_size,
            num_tokens=job.num_tokens,
            seed=texts.seed,
        )

    if setting.disturbed is not None and DISTURBANCES[setting.disturbed].follows_documents:
        assert job.documents is not None, "--documents was checked"
        serve(_texts(job.documents, job.cache_mode, replace(job.model_drafter, seed=texts.seed)))
    return serve(texts)


def _speed(totals: CycleTotals) -> float:
    speed = totals.tokens_per_ms
    assert speed is not None, "the costs are known"
    return speed


def _row(
    job: Job, name: str, setting: Setting, texts: _Texts, by_seed: Sequence[CycleTotals]
) -> Row:
    totals = sum(by_seed, CycleTotals())
    speed, *speeds = map(_speed, (totals, *by_seed))
    assert totals.cycles_per_1k_tokens is not None
    return Row(
        file=job.recording.name,
        family=texts.family,
        costs=job.costs_name,
        batch_size=job.batch_size,
        model_drafter=job.drafter_name,
        policy=name,
        setting=str(setting),
        tokens_per_ms=speed,
        cycles_per_1k=totals.cycles_per_1k_tokens,
        mean_accepted=totals.mean_accepted_len or 0.0,
        cache_share=totals.cache_share or 0.0,
        both_share=totals.num_both / totals.num_cycles,
        seed_spread=(max(speeds) - min(speeds)) / speed,
        num_sessions=len(texts.sessions),
        num_text_tokens=sum(drawn.num_decoded for turns in texts.sessions for drawn in turns),
    )
