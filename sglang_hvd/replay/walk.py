"""Walks recordings as a server would serve them, several at a time."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, HvdConfig
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import PayoffPredictor
from sglang_hvd.payoff.rows import TrainingRows
from sglang_hvd.replay.recordings import Recording, Vocabulary, session_fingerprints
from sglang_hvd.replay.simulator import (
    CycleTotals,
    ReplayedCycle,
    ReplayedDraft,
    count_cycles,
    replay,
    training_rows,
)
from sglang_hvd.suffix_cache import SuffixCache


@dataclass(frozen=True, slots=True)
class WalkSettings:
    """How recordings are walked.

    predictor: for the payoff policy; its file, since walks run in other processes.
    num_model_accepted: accepted tokens of each cycle that verifies the model drafter's draft,
        which is not run. 2 lies between those with the paper's three models (appendix C: 3.2, 2.2
        and 0.8).
    num_model_steps: of the model drafter, for the frequency policy; 8 is the paper's (table 7).
    draft_limits: longest cache drafts, one trace after the other in turns.
    shares_cache: a session's finished outputs are drafts for later ones; False: for itself only.
    """

    config: HvdConfig
    predictor: Path | None = None
    num_model_accepted: int = 2
    num_model_steps: int = 8
    draft_limits: tuple[int, ...] = (DEFAULT_VERIFY_WIDTH - 1,)
    shares_cache: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class SessionWalk:
    """One session of a walk; rows: None if no cycle had a cache draft."""

    fingerprint: str
    totals: CycleTotals
    rows: TrainingRows | None


@dataclass(frozen=True, slots=True, eq=False)
class RecordingWalk:
    """All sessions of a recording, in order: each has those before it in its shared cache."""

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
        """The cycles of those sessions."""
        return sum((s.totals for s in self.sessions if s.fingerprint not in without), CycleTotals())


def walk_recordings(
    recordings: Sequence[Recording],
    vocabulary: Vocabulary,
    settings: WalkSettings,
    *,
    label: str,
    num_processes: int,
    keeps_rows: bool = True,
) -> list[RecordingWalk]:
    """Walks each recording, with a progress bar of that label on stderr.

    Raises ValueError, in one line, for a recording or predictor that cannot be used.
    """
    work = _Work(vocabulary, settings, keeps_rows)
    bar = tqdm(total=len(recordings), desc=label, unit="file", leave=False)
    with bar:
        return list(_run(work, recordings, num_processes, bar.update))


@dataclass(frozen=True)
class _Work:
    vocabulary: Vocabulary
    settings: WalkSettings
    keeps_rows: bool

    def __call__(self, recording: Recording) -> RecordingWalk:
        return walk_recording(recording, self.vocabulary, self.settings, self.keeps_rows)


def _run(
    work: _Work, recordings: Sequence[Recording], num_processes: int, done: Callable[[], object]
) -> Iterable[RecordingWalk]:
    if num_processes == 1:
        for recording in recordings:
            yield work(recording)
            done()
        return
    # Fresh interpreters: a fork would copy locks that threads of the parent may hold.
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for walk in pool.map(work, recordings):
            yield walk
            done()


def walk_recording(
    recording: Recording, vocabulary: Vocabulary, settings: WalkSettings, keeps_rows: bool = True
) -> RecordingWalk:
    """Walks one recording in this process."""
    traces = recording.traces(vocabulary)
    if not traces:
        raise ValueError(f"{recording.path}: no traces")
    # Nothing is corrected online: rows have to show a predictor as it is.
    config = settings.config.model_copy(update={"calibrate": False})
    predictor = None
    if config.policy == "payoff":
        if settings.predictor is not None:
            config = config.model_copy(update={"predictor": settings.predictor})
        predictor = PayoffPredictor.of_config(config)
    drafter = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=predictor,
        token_classes=vocabulary.token_classes,
        num_model_steps=settings.num_model_steps,
        max_cache_draft_tokens=DEFAULT_VERIFY_WIDTH - 1,
    )
    fingerprints = session_fingerprints(traces)
    cycles: dict[str, list[ReplayedCycle]] = {session: [] for session in fingerprints}
    for index, trace in enumerate(traces):
        cycles[trace.session] += replay(
            trace,
            drafter,
            num_model_accepted=settings.num_model_accepted,
            max_cache_draft_tokens=settings.draft_limits[index % len(settings.draft_limits)],
            namespace="" if settings.shares_cache else trace.session,
        )
    return RecordingWalk(
        recording.name,
        traces[0].family,
        tuple(
            SessionWalk(
                fingerprints[session],
                count_cycles(of_session),
                training_rows(of_session) if keeps_rows and _drafts(of_session) else None,
            )
            for session, of_session in cycles.items()
        ),
    )


def _drafts(cycles: Sequence[ReplayedCycle]) -> list[ReplayedDraft]:
    return [cycle.draft for cycle in cycles if cycle.draft is not None]
