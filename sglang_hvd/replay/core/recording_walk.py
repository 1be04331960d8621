"""What a walk of a recording found: totals and training rows of each session."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sglang_hvd.replay.core.replayed import ReplayedCycle, training_rows
from sglang_hvd.replay.core.totals import CycleTotals
from sglang_hvd.replay.core.training_rows import TrainingRows


@dataclass(frozen=True, slots=True, eq=False)
class SessionWalk:
    """One session of a walk.

    rows: None if no cycle that gives a row had a cache draft, or if no such row was kept.
    num_drafts: number of rows before some were dropped for WalkSettings.max_rows.
    """

    fingerprint: str
    totals: CycleTotals
    rows: TrainingRows | None
    num_drafts: int


@dataclass(frozen=True, slots=True, eq=False)
class RecordingWalk:
    """All sessions of a recording, in order. The shared cache of each session holds the earlier
    sessions of its namespace.

    thinning: one row in this many was kept, because there were more than max_rows.
    """

    name: str
    family: str
    sessions: tuple[SessionWalk, ...]
    thinning: int = 1

    def excluding(self, fingerprints: frozenset[str]) -> "RecordingWalk":
        """The walk without the sessions of these fingerprints."""
        kept = tuple(s for s in self.sessions if s.fingerprint not in fingerprints)
        return replace(self, sessions=kept)

    def rows(self) -> TrainingRows | None:
        """The rows of all sessions; None without any."""
        parts = [session.rows for session in self.sessions if session.rows is not None]
        return TrainingRows.concatenate(parts) if parts else None

    def judged_rows(self) -> TrainingRows | None:
        """The rows of drafts that are known to be worth their verification, or not to be; None
        without any."""
        rows = self.rows()
        if rows is None or rows.is_worth_known.all():
            return rows
        return rows.select(rows.is_worth_known) if rows.is_worth_known.any() else None

    def num_drafts(self) -> int:
        """Number of rows before some were dropped for WalkSettings.max_rows."""
        return sum(session.num_drafts for session in self.sessions)

    def every(self, stride: int) -> "RecordingWalk":
        """The same walk with one row in `stride`."""
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
        """The totals of all sessions."""
        return sum((session.totals for session in self.sessions), CycleTotals())


def strides(walks: Sequence[RecordingWalk]) -> list[int]:
    """For each walk, the stride that leaves it as thin as the thinnest of all.

    Otherwise a walk that kept all its rows would count for more than the others once their rows are
    combined.
    """
    max_thinning = max((walk.thinning for walk in walks), default=1)
    return [max_thinning // walk.thinning for walk in walks]


def evened(walks: Sequence[RecordingWalk]) -> list[RecordingWalk]:
    """The same walks, all equally thinned."""
    return [walk.every(stride) for walk, stride in zip(walks, strides(walks), strict=True)]


def fingerprints_of(walks: Sequence[RecordingWalk]) -> frozenset[str]:
    """Fingerprints of the sessions of all recordings."""
    return frozenset(session.fingerprint for walk in walks for session in walk.sessions)


class RecordingRows:
    """Collects the rows of a recording's sessions. If there are more than max_rows, it keeps every
    second row, or every fourth, and so on.

    num_drafts: rows of each session before any were dropped.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._parts: dict[str, list[_NumberedRows]] = {}
        self._num_seen = self._num_kept = 0
        self.thinning = 1
        self.num_drafts: Counter[str] = Counter()

    def add(self, session: str, cycles: Sequence[ReplayedCycle]) -> None:
        """Adds the rows of the cycles that had a cache draft."""
        if all(cycle.draft is None for cycle in cycles):
            return
        rows = training_rows(cycles)
        numbers = np.arange(self._num_seen, self._num_seen + len(rows))
        self._num_seen += len(rows)
        self.num_drafts[session] += len(rows)
        of_session = self._parts.setdefault(session, [])
        of_session.append(_NumberedRows(numbers, rows).every(self.thinning))
        self._num_kept += len(of_session[-1].rows)
        while self._num_kept > self._max_rows:
            self.thinning *= 2
            self._parts = {
                session: [part.every(self.thinning) for part in parts]
                for session, parts in self._parts.items()
            }
            self._num_kept = sum(len(p.rows) for parts in self._parts.values() for p in parts)

    def of(self, session: str) -> TrainingRows | None:
        """The kept rows of a session; None without any."""
        parts = [part.rows for part in self._parts.pop(session, []) if len(part.rows)]
        return TrainingRows.concatenate(parts) if parts else None


@dataclass(frozen=True, slots=True, eq=False)
class _NumberedRows:
    """numbers: int64[num_rows], the rows' places among all rows of the recording."""

    numbers: npt.NDArray[np.int64]
    rows: TrainingRows

    def every(self, stride: int) -> "_NumberedRows":
        """The rows whose number is a multiple of the stride."""
        is_kept = self.numbers % stride == 0
        if is_kept.all():
            return self
        return _NumberedRows(self.numbers[is_kept], self.rows.select(is_kept))
