"""Walks recordings as a server would serve them, several at a time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from sglang_hvd.allocation import (
    DraftExtend,
    StepAllocator,
    StepCosts,
    draft_step_choices,
    model_tree_sizes,
    powers_of_two_below,
)
from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, HvdConfig
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import AcceptancePredictor, TokenClasses
from sglang_hvd.payoff.training_rows import TrainingRows
from sglang_hvd.replay.model_drafter import ModelDrafter
from sglang_hvd.replay.plan_costs import PlanCosts
from sglang_hvd.replay.recordings import MEAN, Recording, session_fingerprints
from sglang_hvd.replay.replayed import ReplayedCycle, replay, training_rows
from sglang_hvd.replay.totals import CycleTotals, count_cycles
from sglang_hvd.replay.trace_tokenizer import TraceTokenizer
from sglang_hvd.replay.workers import workers
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
    without: fingerprints of sessions that give no rows.
    max_rows: the most rows of all recordings together, of which each has an even part. One that
        has more gives every second of them, or every fourth, ...; a row takes up to 3 KB, or 5.5
        in a walk with drafts of 63 tokens, and while a walk ends twice as much.
    """

    config: HvdConfig
    model_drafter: ModelDrafter = ModelDrafter()  # noqa: RUF009  it is immutable
    draft_limits: tuple[int, ...] = (DEFAULT_VERIFY_WIDTH - 1,)
    shares_cache: bool = True
    costs: StepCosts | None = None
    row_stride: int = 1
    without: frozenset[str] = frozenset()
    max_rows: int = 1_500_000

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
        return PlanCosts(self.costs, self.widths, self.draft_extend)

    @property
    def draft_extend(self) -> DraftExtend:
        """Behind every step, unless something else is asked for."""
        return DraftExtend.of(self.config, default="never")

    @property
    def model_drafts(self) -> tuple[Sequence[int], Sequence[int]]:
        """Sizes in nodes and numbers of steps that the model drafter's drafts can have; the last
        are the full draft's.

        Policy allocate chooses among those of a server whose drafter has ModelDrafter's tree. Other
        policies' drafts, and those of a drafter that brings the same in every cycle, count as
        chains.
        """
        num_steps = self.model_drafter.num_steps
        if self.config.policy != "allocate" or self.model_drafter.odds_ratio is None:
            return (num_steps,), (num_steps,)
        return model_tree_sizes(self.model_drafter.num_nodes), draft_step_choices(num_steps)


@dataclass(frozen=True, slots=True, eq=False)
class SessionWalk:
    """One session of a walk.

    rows: None if none of the cycles that give one had a cache draft, or none of those is left.
    num_drafts: the rows that there would be if all were kept.
    """

    fingerprint: str
    totals: CycleTotals
    rows: TrainingRows | None
    num_drafts: int


@dataclass(frozen=True, slots=True, eq=False)
class RecordingWalk:
    """All sessions of a recording, in order: each has those before it, of its namespace, in its
    shared cache.

    thinning: rows for which each one stands, where there were more than max_rows.
    """

    name: str
    family: str
    sessions: tuple[SessionWalk, ...]
    thinning: int = 1

    def excluding(self, fingerprints: frozenset[str]) -> "RecordingWalk":
        """The sessions that are not among these."""
        kept = tuple(s for s in self.sessions if s.fingerprint not in fingerprints)
        return replace(self, sessions=kept)

    def rows(self) -> TrainingRows | None:
        """Those of all sessions; None without any."""
        parts = [session.rows for session in self.sessions if session.rows is not None]
        return TrainingRows.concatenate(parts) if parts else None

    def judged_rows(self) -> TrainingRows | None:
        """Those of the drafts of which it is known whether they were worth their verification; None
        without any."""
        rows = self.rows()
        if rows is None or rows.is_worth_known.all():
            return rows
        return rows.select(rows.is_worth_known) if rows.is_worth_known.any() else None

    def num_drafts(self) -> int:
        """The rows that there would be if all were kept."""
        return sum(session.num_drafts for session in self.sessions)

    def every(self, stride: int) -> "RecordingWalk":
        """The same with one row in so many."""
        if stride == 1:
            return self
        num_rows, sessions = 0, []
        for session in self.sessions:
            rows = session.rows
            if rows is not None:
                kept = np.arange(-num_rows % stride, len(rows), stride)
                num_rows += len(rows)
                rows = rows.select(kept) if len(kept) else None
            sessions.append(replace(session, rows=rows))
        return RecordingWalk(self.name, self.family, tuple(sessions), self.thinning * stride)

    def totals(self) -> CycleTotals:
        """Those of all sessions."""
        return sum((session.totals for session in self.sessions), CycleTotals())


def strides(walks: Sequence[RecordingWalk]) -> list[int]:
    """One row of each walk in how many stands for as many as where rows stand for most: else those
    of which all rows are kept would count for more than others where rows are put together."""
    most = max((walk.thinning for walk in walks), default=1)
    return [most // walk.thinning for walk in walks]


def evened(walks: Sequence[RecordingWalk]) -> list[RecordingWalk]:
    """The same walks, with rows that each stand for as many."""
    return [walk.every(stride) for walk, stride in zip(walks, strides(walks), strict=True)]


def fingerprints_of(walks: Sequence[RecordingWalk]) -> frozenset[str]:
    """The sessions of all recordings."""
    return frozenset(session.fingerprint for walk in walks for session in walk.sessions)


def walk_recordings(
    recordings: Sequence[Recording],
    tokenizer: TraceTokenizer,
    settings: WalkSettings,
    *,
    label: str,
    num_processes: int,
) -> list[RecordingWalk]:
    """Walks each recording, with a progress bar of that label on stderr, if that is a terminal.

    Raises ValueError, in one line, for a recording or predictor that cannot be used, or if a
    process has not enough memory.
    """
    most_rows = max(1, settings.max_rows // max(1, len(recordings)))
    with tqdm(total=len(recordings), desc=label, unit="file", leave=False, disable=None) as bar:
        walks = []
        for walk in _walk_all(recordings, tokenizer, settings, most_rows, num_processes):
            walks.append(walk)
            bar.update()
        return walks


def _walk_all(
    recordings: Sequence[Recording],
    tokenizer: TraceTokenizer,
    settings: WalkSettings,
    most_rows: int,
    num_processes: int,
) -> Iterator[RecordingWalk]:
    if num_processes == 1:
        for recording in recordings:
            yield walk_recording(recording, tokenizer, settings, most_rows)
        return
    # Each is given the tokenizer once, not with every recording.
    with workers(num_processes, _set_up_worker, tokenizer, settings, most_rows) as started:
        yield from started.map(_walk_in_worker, recordings)


_of_worker: tuple[TraceTokenizer, WalkSettings, int]


def _set_up_worker(tokenizer: TraceTokenizer, settings: WalkSettings, most_rows: int) -> None:
    global _of_worker
    _of_worker = tokenizer, settings, most_rows


def _walk_in_worker(recording: Recording) -> RecordingWalk:
    return walk_recording(recording, *_of_worker)


def walk_recording(
    recording: Recording, tokenizer: TraceTokenizer, settings: WalkSettings, most_rows: int
) -> RecordingWalk:
    """Walks one recording in this process.

    most_rows: of the recording, see WalkSettings.max_rows.

    Raises ValueError, in one line, for a recording or predictor that cannot be used.
    """
    traces = _replayable_traces(recording, tokenizer)
    drafter = _drafter(settings, tokenizer.token_classes)
    fingerprints = session_fingerprints(traces)
    costs = settings.plan_costs
    rows = _RecordingRows(most_rows)
    # In the order in which the sessions begin.
    totals = dict.fromkeys(fingerprints, CycleTotals())
    num_cycles = dict.fromkeys(fingerprints, 0)
    for trace, cycles in _replayed(traces, drafter, settings):
        session = trace.session
        num_context = len(trace.prompt_ids) + 1  # and the token that its prefill generates
        totals[session] += count_cycles(cycles, costs, num_context=num_context)
        if fingerprints[session] not in settings.without:
            first = -num_cycles[session] % settings.row_stride
            rows.add(session, cycles[first :: settings.row_stride])
        num_cycles[session] += len(cycles)
    return RecordingWalk(
        recording.name,
        traces[0].family,
        tuple(
            SessionWalk(fingerprint, totals[session], rows.of(session), rows.num_drafts[session])
            for session, fingerprint in fingerprints.items()
        ),
        rows.thinning,
    )


class _RecordingRows:
    """The rows of a recording's sessions: all, or every second, or every fourth, ..., so that no
    more than `most` are kept.

    num_drafts: by session, the rows that it was given.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: dict[str, list[_NumberedRows]] = {}
        self._num_seen = self._num_kept = 0
        self.thinning = 1
        self.num_drafts: Counter[str] = Counter()

    def add(self, session: str, cycles: Sequence[ReplayedCycle]) -> None:
        """Takes the rows of cycles, if any of these had a cache draft."""
        if all(cycle.draft is None for cycle in cycles):
            return
        rows = training_rows(cycles)
        numbers = np.arange(self._num_seen, self._num_seen + len(rows))
        self._num_seen += len(rows)
        self.num_drafts[session] += len(rows)
        of_session = self._parts.setdefault(session, [])
        of_session.append(_NumberedRows(numbers, rows).every(self.thinning))
        self._num_kept += len(of_session[-1].rows)
        while self._num_kept > self._most:
            self.thinning *= 2
            self._parts = {
                session: [part.every(self.thinning) for part in parts]
                for session, parts in self._parts.items()
            }
            self._num_kept = sum(len(p.rows) for parts in self._parts.values() for p in parts)

    def of(self, session: str) -> TrainingRows | None:
        """None if none of the session's cycles had a cache draft, or none of those is left."""
        parts = [part.rows for part in self._parts.pop(session, []) if len(part.rows)]
        return TrainingRows.concatenate(parts) if parts else None


@dataclass(frozen=True, slots=True, eq=False)
class _NumberedRows:
    """numbers: int64[num_rows], which of the recording's rows these are."""

    numbers: npt.NDArray[np.int64]
    rows: TrainingRows

    def every(self, stride: int) -> "_NumberedRows":
        """Those whose number is a multiple of it."""
        is_kept = self.numbers % stride == 0
        if is_kept.all():
            return self
        return _NumberedRows(self.numbers[is_kept], self.rows.select(is_kept))


def _replayable_traces(recording: Recording, tokenizer: TraceTokenizer) -> list[Trace]:
    traces = recording.traces(tokenizer)
    if not traces:
        raise ValueError(f"{recording.path}: no traces: leave it out of --traces")
    families = sorted({trace.family for trace in traces})
    if len(families) > 1 or families == [MEAN]:
        raise ValueError(
            f"{recording.path}: of the families {', '.join(families)}: results are by family, of "
            f"which a file has one, not called {MEAN}"
        )
    if not all(trace.has_prompt for trace in traces):
        raise ValueError(
            f"{recording.path}: recorded without prompts, which drafts come from, it cannot be "
            f"replayed: record with --hvd-record-prompts true"
        )
    return traces


def _drafter(settings: WalkSettings, token_classes: TokenClasses) -> HybridDrafter:
    config = settings.config
    sizes, steps = settings.model_drafts
    allocator = None
    if settings.costs is not None and config.policy == "allocate":
        allocator = StepAllocator(
            settings.costs,
            widths=settings.widths,
            model_sizes=sizes,
            num_steps=steps,
            draft_extend=settings.draft_extend,
        )
    return HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=AcceptancePredictor.of_config(config) if config.predicts else None,
        token_classes=token_classes,
        num_model_steps=steps[-1],
        num_model_nodes=sizes[-1],
        verify_width=settings.widths[-1],
        allocator=allocator,
    )


def _replayed(
    traces: Sequence[Trace], drafter: HybridDrafter, settings: WalkSettings
) -> Iterator[tuple[Trace, list[ReplayedCycle]]]:
    """The cycles of one trace after the other."""
    drafter_of_model = settings.model_drafter
    sizes, _ = settings.model_drafts
    if len(sizes) == 1:  # a chain has what the full tree has
        by_size = {sizes[0]: drafter_of_model.accepted_lens(traces, settings.config)}
    else:
        by_size = drafter_of_model.accepted_by_size(traces, settings.config, sizes)
    for index, trace in enumerate(traces):
        yield (
            trace,
            replay(
                trace,
                drafter,
                num_model_accepted={size: lens[index] for size, lens in by_size.items()},
                max_cache_draft_tokens=settings.draft_limits[index % len(settings.draft_limits)],
                namespace=trace.namespace if settings.shares_cache else trace.session,
            ),
        )
