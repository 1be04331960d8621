"""Walks recordings: replays all sessions of each, as a server would serve them one by one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from sglang_hvd.allocation import (
    DrafterChoices,
    DraftExtend,
    StepAllocator,
    draft_step_choices,
    model_tree_sizes,
    powers_of_two_below,
)
from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, HvdConfig
from sglang_hvd.costs import StepCosts
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import AcceptancePredictor, TokenClasses
from sglang_hvd.replay.core.model_drafter import ModelDrafter
from sglang_hvd.replay.core.recording_walk import RecordingRows, RecordingWalk, SessionWalk
from sglang_hvd.replay.core.recordings import MEAN, Recording, TraceTokenizer, session_fingerprints
from sglang_hvd.replay.core.replayed import ReplayedCycle, replay
from sglang_hvd.replay.core.totals import CycleTotals, PlanCosts, count_cycles
from sglang_hvd.replay.core.workers import workers
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.trace import Trace
from sglang_hvd.view.cycles import Cycle


@dataclass(frozen=True, slots=True)
class WalkSettings:
    """How recordings are walked.

    config: the server's configuration. With calibrate the predictor is corrected along the way, as
        in a server; without it the rows show the predictor as it is.
    model_drafter: simulates the model drafter: how many tokens each of its drafts has accepted.
    draft_limits: longest cache drafts, in tokens. The first trace uses the first limit, the second
        trace the second one, and so on, over and over.
    costs: step costs of the machine, for the time of the cycles and for policy `allocate`. None:
        no times, and no policy `allocate`.
    shares_cache: later sessions of a namespace draft from a session's finished outputs. False: each
        session drafts from its own outputs only.
    row_stride: one cycle in this many of a session gives a row.
    without: fingerprints of sessions that give no rows.
    max_rows: limit on the rows of all recordings together; each recording may have an equal part.
        A recording with more keeps every second row, or every fourth, and so on. A row needs up to
        3 KB (5.5 KB with drafts of 63 tokens), and twice that while a walk ends.
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
        """Nodes per request that a step can verify: the configured widths, or powers of two if none
        are configured, and the width that the longest drafts need."""
        widest, narrow = max(self.draft_limits) + 1, self.config.narrow_widths
        if narrow is None:
            return (*powers_of_two_below(widest), widest)
        return (*(width for width in narrow if width < widest), widest)

    @property
    def plan_costs(self) -> PlanCosts | None:
        """The times of steps by their plans; None without costs."""
        if self.costs is None:
            return None
        return PlanCosts(self.costs, self.widths, self.draft_extend)

    @property
    def draft_extend(self) -> DraftExtend:
        """After every step, unless the configuration says otherwise."""
        return DraftExtend.of(self.config, default="never")

    @property
    def model_drafts(self) -> tuple[Sequence[int], Sequence[int]]:
        """Sizes in nodes and numbers of steps that the model drafter's drafts can have. The last of
        each are the full draft's.

        Policy allocate chooses among the sizes and steps of a server with ModelDrafter's tree.
        Under other policies, and if every cycle has the same number accepted, drafts are chains.
        """
        num_steps = self.model_drafter.num_steps
        if self.config.policy != "allocate" or self.model_drafter.odds_ratio is None:
            return (num_steps,), (num_steps,)
        return model_tree_sizes(self.model_drafter.num_nodes), draft_step_choices(num_steps)


def walk_recordings(
    recordings: Sequence[Recording],
    tokenizer: TraceTokenizer,
    settings: WalkSettings,
    *,
    label: str,
    num_processes: int,
) -> list[RecordingWalk]:
    """Walks each recording. Shows a progress bar with this label on stderr if stderr is a terminal.

    Raises ValueError, in one line, for a recording or predictor that cannot be used, or if a
    process ran out of memory.
    """
    max_rows = max(1, settings.max_rows // max(1, len(recordings)))
    with tqdm(total=len(recordings), desc=label, unit="file", leave=False, disable=None) as bar:
        walks = []
        for walk in _walk_all(recordings, tokenizer, settings, max_rows, num_processes):
            walks.append(walk)
            bar.update()
        return walks


def _walk_all(
    recordings: Sequence[Recording],
    tokenizer: TraceTokenizer,
    settings: WalkSettings,
    max_rows: int,
    num_processes: int,
) -> Iterator[RecordingWalk]:
    if num_processes == 1:
        for recording in recordings:
            yield walk_recording(recording, tokenizer, settings, max_rows)
        return
    # Each process receives the tokenizer once, not with every recording.
    with workers(num_processes, _set_up_worker, tokenizer, settings, max_rows) as pool:
        yield from pool.map(_walk_in_worker, recordings)


_of_worker: tuple[TraceTokenizer, WalkSettings, int]


def _set_up_worker(tokenizer: TraceTokenizer, settings: WalkSettings, max_rows: int) -> None:
    global _of_worker
    _of_worker = tokenizer, settings, max_rows


def _walk_in_worker(recording: Recording) -> RecordingWalk:
    return walk_recording(recording, *_of_worker)


def walk_recording(
    recording: Recording, tokenizer: TraceTokenizer, settings: WalkSettings, max_rows: int
) -> RecordingWalk:
    """Walks one recording in this process.

    max_rows: limit on the recording's rows; see WalkSettings.max_rows.

    Raises ValueError, in one line, for a recording or predictor that cannot be used.
    """
    traces = _replayable_traces(recording, tokenizer)
    drafter = _drafter(settings, tokenizer.token_classes)
    fingerprints = session_fingerprints(traces)
    costs = settings.plan_costs
    rows = RecordingRows(max_rows)
    # Sessions are in the order in which they begin.
    totals = dict.fromkeys(fingerprints, CycleTotals())
    num_cycles = dict.fromkeys(fingerprints, 0)
    for trace, cycles in _replayed(traces, drafter, settings):
        session = trace.session
        num_context = len(trace.prompt_ids) + 1  # the prefill generates one token
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


def report_last(
    recording: Recording, tokenizer: TraceTokenizer, settings: WalkSettings, *, num_replies: int
) -> list[tuple[Trace, list[Cycle]]]:
    """Walks one recording in this process. Returns its last replies, with a report of each cycle.

    Raises ValueError, in one line, for a recording or predictor that cannot be used.
    """
    traces = _replayable_traces(recording, tokenizer)
    drafter = _drafter(settings, tokenizer.token_classes)
    reports: dict[int, list[Cycle]] = {
        index: [] for index in range(max(0, len(traces) - num_replies), len(traces))
    }
    for _ in _replayed(traces, drafter, settings, reports):
        pass
    return [(traces[index], cycles) for index, cycles in reports.items()]


def _replayable_traces(recording: Recording, tokenizer: TraceTokenizer) -> list[Trace]:
    traces = recording.traces(tokenizer)
    if not traces:
        raise ValueError(f"{recording.path}: no traces: leave it out of --traces")
    families = sorted({trace.family for trace in traces})
    if len(families) > 1 or families == [MEAN]:
        raise ValueError(
            f"{recording.path}: has traces of the families {', '.join(families)}: give every file "
            f"traces of one family, which is not called {MEAN}"
        )
    if not all(trace.has_prompt for trace in traces):
        raise ValueError(
            f"{recording.path}: recorded without prompts, so it cannot be replayed: record with "
            f"--hvd-record-prompts true"
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
            drafters=[DrafterChoices(tuple(sizes), tuple(steps))],
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
    traces: Sequence[Trace],
    drafter: HybridDrafter,
    settings: WalkSettings,
    reports: Mapping[int, list[Cycle]] | None = None,
) -> Iterator[tuple[Trace, list[ReplayedCycle]]]:
    """Each trace with its cycles, in order.

    reports: by the place of a trace, what receives a report of its cycles.
    """
    model_drafter = settings.model_drafter
    sizes, _ = settings.model_drafts
    if len(sizes) == 1:  # a chain has as many tokens accepted as the full tree
        by_size = {sizes[0]: model_drafter.accepted_lens(traces, settings.config)}
    else:
        by_size = model_drafter.accepted_by_size(traces, settings.config, sizes)
    for index, trace in enumerate(traces):
        yield (
            trace,
            replay(
                trace,
                drafter,
                num_model_accepted={size: lens[index] for size, lens in by_size.items()},
                max_cache_draft_tokens=settings.draft_limits[index % len(settings.draft_limits)],
                namespace=trace.namespace if settings.shares_cache else trace.session,
                reports=None if reports is None else reports.get(index),
            ),
        )
