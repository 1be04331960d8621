"""Walks recordings as a server would serve them, several at a time."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from tqdm import tqdm

from sglang_hvd.allocation import StepAllocator, StepCosts, powers_of_two_below
from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, HvdConfig
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import PayoffPredictor, TokenClasses
from sglang_hvd.payoff.rows import TrainingRows
from sglang_hvd.replay.model_drafter import ModelDrafter
from sglang_hvd.replay.plan_costs import PlanCosts
from sglang_hvd.replay.recordings import Recording, session_fingerprints
from sglang_hvd.replay.replayed import ReplayedCycle, replay, training_rows
from sglang_hvd.replay.totals import CycleTotals, count_cycles
from sglang_hvd.replay.trace_tokenizer import TraceTokenizer
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class WalkSettings:
    """How recordings are walked.

    config: of the server. calibrate corrects the predictor along the way, as the server does;
        without it rows show a predictor as it is.
    model_drafter: what each cycle of the model drafter, which is not run, has accepted.
    draft_limits: longest cache drafts, in tokens; traces take them in turns.
    costs: step costs of the machine, for the time of the cycles and policy `allocate`; None:
        neither.
    shares_cache: a session's finished outputs are drafts for later ones of its namespace;
        False: for itself only.
    row_stride: one cycle in this many of a session gives a row.
    """

    config: HvdConfig
    model_drafter: ModelDrafter = ModelDrafter()  # noqa: RUF009  it is immutable
    draft_limits: tuple[int, ...] = (DEFAULT_VERIFY_WIDTH - 1,)
    shares_cache: bool = True
    costs: StepCosts | None = None
    row_stride: int = 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes per request that a step can verify: the configured widths or else powers of two,
        and the width that the longest drafts need."""
        widest, narrow = max(self.draft_limits) + 1, self.config.narrow_widths
        if narrow is None:
            return (*powers_of_two_below(widest), widest)
        return (*(width for width in narrow if width < widest), widest)

    @property
    def plan_costs(self) -> PlanCosts | None:
        """The time of plans; None without costs."""
        if self.costs is None:
            return None
        return PlanCosts(self.costs, self.widths, self.config.drafts_with_model)


@dataclass(frozen=True, slots=True, eq=False)
class SessionWalk:
    """One session of a walk; rows: None if none of the cycles that give one had a cache draft."""

    fingerprint: str
    totals: CycleTotals
    rows: TrainingRows | None


@dataclass(frozen=True, slots=True, eq=False)
class RecordingWalk:
    """All sessions of a recording, in order: each has those before it, of its namespace, in its
    shared cache."""

    name: str
    family: str
    sessions: tuple[SessionWalk, ...]

    def rows(self, *, without: frozenset[str] = frozenset()) -> TrainingRows | None:
        """The rows of the sessions that are not among these fingerprints."""
        parts = [
            session.rows
            for session in self.sessions
            if session.rows is not None and session.fingerprint not in without
        ]
        return TrainingRows.concatenate(parts) if parts else None

    def totals(self, *, without: frozenset[str] = frozenset()) -> CycleTotals:
        """The totals of the sessions that are not among these fingerprints."""
        return sum((s.totals for s in self.sessions if s.fingerprint not in without), CycleTotals())


def walk_recordings(
    recordings: Sequence[Recording],
    tokenizer: TraceTokenizer,
    settings: WalkSettings,
    *,
    label: str,
    num_processes: int,
) -> list[RecordingWalk]:
    """Walks each recording, with a progress bar of that label on stderr.

    Raises ValueError, in one line, for a recording or predictor that cannot be used.
    """
    with tqdm(total=len(recordings), desc=label, unit="file", leave=False) as bar:
        walks = []
        for walk in _walk_all(recordings, tokenizer, settings, num_processes):
            walks.append(walk)
            bar.update()
        return walks


def _walk_all(
    recordings: Sequence[Recording],
    tokenizer: TraceTokenizer,
    settings: WalkSettings,
    num_processes: int,
) -> Iterator[RecordingWalk]:
    if num_processes == 1:
        for recording in recordings:
            yield walk_recording(recording, tokenizer, settings)
        return
    # Fresh interpreters: a fork would copy locks that threads of the parent may hold. Each is given
    # the tokenizer once, not with every recording.
    with ProcessPoolExecutor(
        num_processes,
        mp_context=get_context("spawn"),
        initializer=_set_up_worker,
        initargs=(tokenizer, settings),
    ) as pool:
        yield from pool.map(_walk_in_worker, recordings)


_of_worker: tuple[TraceTokenizer, WalkSettings]


def _set_up_worker(tokenizer: TraceTokenizer, settings: WalkSettings) -> None:
    global _of_worker
    _of_worker = tokenizer, settings


def _walk_in_worker(recording: Recording) -> RecordingWalk:
    return walk_recording(recording, *_of_worker)


def walk_recording(
    recording: Recording, tokenizer: TraceTokenizer, settings: WalkSettings
) -> RecordingWalk:
    """Walks one recording in this process.

    Raises ValueError, in one line, for a recording or predictor that cannot be used.
    """
    traces = _replayable_traces(recording, tokenizer)
    drafter = _drafter(settings, tokenizer.token_classes)
    cycles = _cycles_by_session(traces, drafter, settings)
    fingerprints = session_fingerprints(traces)
    costs = settings.plan_costs
    return RecordingWalk(
        recording.name,
        traces[0].family,
        tuple(
            SessionWalk(
                fingerprints[session],
                count_cycles(of_session, costs),
                _rows(of_session[:: settings.row_stride]),
            )
            for session, of_session in cycles.items()
        ),
    )


def _replayable_traces(recording: Recording, tokenizer: TraceTokenizer) -> list[Trace]:
    traces = recording.traces(tokenizer)
    if not traces:
        raise ValueError(f"{recording.path}: no traces: leave it out of --traces")
    if not all(trace.has_prompt for trace in traces):
        raise ValueError(
            f"{recording.path}: recorded without prompts, which drafts come from, it cannot be "
            f"replayed: record with --hvd-record-prompts true"
        )
    return traces


def _drafter(settings: WalkSettings, token_classes: TokenClasses) -> HybridDrafter:
    config = settings.config
    # The drafts that the model drafter is drawn for count as chains.
    num_steps = settings.model_drafter.num_steps
    allocator = None
    if settings.costs is not None and config.policy == "allocate":
        allocator = StepAllocator(
            settings.costs,
            widths=settings.widths,
            model_sizes=[num_steps],
            num_steps=[num_steps],
        )
    return HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=PayoffPredictor.of_config(config) if config.predicts else None,
        token_classes=token_classes,
        num_model_steps=num_steps,
        num_model_nodes=num_steps,
        verify_width=settings.widths[-1],
        allocator=allocator,
    )


def _cycles_by_session(
    traces: Sequence[Trace], drafter: HybridDrafter, settings: WalkSettings
) -> dict[str, list[ReplayedCycle]]:
    """The cycles of each session, in the order in which the sessions begin."""
    cycles: dict[str, list[ReplayedCycle]] = {trace.session: [] for trace in traces}
    accepted_lens = settings.model_drafter.accepted_lens(traces, settings.config)
    for index, (trace, accepted) in enumerate(zip(traces, accepted_lens, strict=True)):
        cycles[trace.session] += replay(
            trace,
            drafter,
            num_model_accepted=accepted,
            max_cache_draft_tokens=settings.draft_limits[index % len(settings.draft_limits)],
            namespace=trace.namespace if settings.shares_cache else trace.session,
        )
    return cycles


def _rows(cycles: Sequence[ReplayedCycle]) -> TrainingRows | None:
    """Rows of the cycles that had a cache draft; None if none had."""
    if all(cycle.draft is None for cycle in cycles):
        return None
    return training_rows(cycles)
