"""What training looks at of many drafts, in a fraction of the memory that whole drafts take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.payoff.rows import TrainingRows


@dataclass(frozen=True, slots=True, eq=False)
class Lessons:
    """The tokens that were judged: of each row those accepted, and the one after them if the draft
    has one. Rows stand one after the other. Beside them the first tokens of each draft, judged or
    not, which tell whether it was worth its verification.

    features: float32[num_rows, len(FEATURE_NAMES)].
    accepted_lens, num_judged: int32[num_rows].
    positions: float32[sum of num_judged, len(POSITION_FEATURES)].
    head: float32[num_rows, WORTH_LEN or fewer, len(POSITION_FEATURES)].
    is_long: bool[num_rows], whether a draft has so many tokens.
    weights: float32[num_rows], how much a row counts.
    """

    features: npt.NDArray[np.float32]
    accepted_lens: npt.NDArray[np.int32]
    num_judged: npt.NDArray[np.int32]
    positions: npt.NDArray[np.float32]
    head: npt.NDArray[np.float32]
    is_long: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.num_judged)

    @classmethod
    def of(cls, rows: TrainingRows) -> "Lessons":
        """All rows; each counts 1."""
        longest = rows.positions.shape[1]
        num = np.minimum(rows.accepted_lens + 1, np.minimum(rows.draft_lens, longest))
        return cls(
            features=rows.features,
            accepted_lens=rows.accepted_lens,
            num_judged=num.astype(np.int32),
            positions=rows.positions[np.arange(longest) < num[:, None]],
            # A copy, or all positions would stay with it.
            head=rows.positions[:, :WORTH_LEN].copy(),
            is_long=np.minimum(rows.draft_lens, longest) >= WORTH_LEN,
            weights=np.ones(len(rows), np.float32),
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Lessons"]) -> "Lessons":
        """All rows of the parts, in order."""
        longest = max(part.head.shape[1] for part in parts)
        heads = [
            np.pad(part.head, ((0, 0), (0, longest - part.head.shape[1]), (0, 0))) for part in parts
        ]
        return cls(
            features=np.concatenate([part.features for part in parts]),
            accepted_lens=np.concatenate([part.accepted_lens for part in parts]),
            num_judged=np.concatenate([part.num_judged for part in parts]),
            positions=np.concatenate([part.positions for part in parts]),
            head=np.concatenate(heads),
            is_long=np.concatenate([part.is_long for part in parts]),
            weights=np.concatenate([part.weights for part in parts]),
        )

    @property
    def first(self) -> npt.NDArray[np.int64]:
        """Where each row's tokens begin: int64[num_rows]."""
        return np.cumsum(self.num_judged, dtype=np.int64) - self.num_judged

    def select(self, rows: npt.NDArray[np.intp]) -> "Lessons":
        """Some of the rows, in this order."""
        num = self.num_judged[rows]
        before = np.cumsum(num, dtype=np.int64) - num
        tokens = np.arange(num.sum()) + np.repeat(self.first[rows] - before, num)
        return Lessons(
            self.features[rows],
            self.accepted_lens[rows],
            num,
            self.positions[tokens],
            self.head[rows],
            self.is_long[rows],
            self.weights[rows],
        )

    def sample(self, num_rows: int, seed: int) -> "Lessons":
        """At most num_rows of them, without replacement."""
        if len(self) <= num_rows:
            return self
        return self.select(np.random.default_rng(seed).choice(len(self), num_rows, replace=False))

    def weighted(self, factor: float | npt.NDArray[np.float32]) -> "Lessons":
        """With each weight times this, or its row's."""
        return replace(self, weights=(self.weights * factor).astype(np.float32))

    def unweighted(self) -> "Lessons":
        """Each row counts 1, as the paper's predictor learns."""
        return replace(self, weights=np.ones(len(self), np.float32))
