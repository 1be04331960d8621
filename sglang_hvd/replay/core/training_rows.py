"""The rows that training and evaluation read: cache drafts and how much of them was accepted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.payoff.features import POSITION_FEATURES
from sglang_hvd.payoff.predictor import AcceptancePredictor, Prediction
from sglang_hvd.payoff.tracker import DraftFeatures

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRows:
    """One row per cache draft.

    features: float32[num_rows, len(FEATURE_NAMES)].
    positions: float32[num_rows, longest, len(POSITION_FEATURES)].
    draft_lens, accepted_lens: int32[num_rows], proposed tokens, and those that the target model
        would accept. If the text ends inside a draft, the rest of the draft counts as rejected. If
        the text was cut off there, the draft ends at the cut.
    is_verified: bool[num_rows], whether this draft was the one that was verified.
    is_worth_known: bool[num_rows], whether it is known if the draft was worth its verification. It
        is unknown if the text was cut off inside the draft's first six tokens.
    """

    features: npt.NDArray[np.float32]
    positions: npt.NDArray[np.float32]
    draft_lens: npt.NDArray[np.int32]
    accepted_lens: npt.NDArray[np.int32]
    is_verified: npt.NDArray[np.bool_]
    is_worth_known: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.draft_lens)

    @classmethod
    def concatenate(cls, parts: Sequence["TrainingRows"]) -> "TrainingRows":
        """All rows of the parts, in order."""
        longest = max(part.positions.shape[1] for part in parts)
        num_rows = sum(map(len, parts))
        positions = np.zeros((num_rows, longest, len(POSITION_FEATURES)), np.float32)
        first = 0
        for part in parts:
            positions[first : first + len(part), : part.positions.shape[1]] = part.positions
            first += len(part)
        return cls(
            features=np.concatenate([part.features for part in parts]),
            positions=positions,
            draft_lens=np.concatenate([part.draft_lens for part in parts]),
            accepted_lens=np.concatenate([part.accepted_lens for part in parts]),
            is_verified=np.concatenate([part.is_verified for part in parts]),
            is_worth_known=np.concatenate([part.is_worth_known for part in parts]),
        )

    def select(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> "TrainingRows":
        """The rows of these indices, or those that are True."""
        return TrainingRows(
            self.features[rows],
            self.positions[rows],
            self.draft_lens[rows],
            self.accepted_lens[rows],
            self.is_verified[rows],
            self.is_worth_known[rows],
        )

    def sample(self, num_rows: int, seed: int) -> "TrainingRows":
        """At most num_rows random rows, without replacement."""
        if len(self) <= num_rows:
            return self
        return self.select(np.random.default_rng(seed).choice(len(self), num_rows, replace=False))

    def predict(self, predictor: AcceptancePredictor) -> Prediction:
        """The prediction of every row."""
        parts = []
        for first in range(0, len(self), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            drafts = DraftFeatures.of_size(len(self.draft_lens[rows]))
            drafts.draft_lens[:] = self.draft_lens[rows]
            drafts.features[:] = self.features[rows]
            of_tokens = self.positions[rows].transpose(0, 2, 1)
            drafts.positions[:, :, : of_tokens.shape[2]] = of_tokens
            parts.append(predictor.predict(drafts))
        acceptance = [part.acceptance for part in parts if part.acceptance is not None]
        return Prediction(
            np.concatenate([part.accepted_lens for part in parts]),
            np.concatenate(acceptance) if acceptance else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Lessons:
    """The parts of many drafts that training reads, in a fraction of the memory of TrainingRows.

    The judged tokens of a row are its accepted tokens, and the rejected one after them if the draft
    has one. Rows are stored one after the other. The head holds the first tokens of each draft,
    judged or not, which decide whether it was worth its verification.

    features: float32[num_rows, len(FEATURE_NAMES)].
    accepted_lens, num_judged: int32[num_rows].
    positions: float32[sum of num_judged, len(POSITION_FEATURES)].
    head: float32[num_rows, WORTH_LEN or fewer, len(POSITION_FEATURES)].
    is_long: bool[num_rows], whether a draft has at least WORTH_LEN tokens.
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
        """All rows, with weight 1."""
        longest = rows.positions.shape[1]
        num = np.minimum(rows.accepted_lens + 1, np.minimum(rows.draft_lens, longest))
        return cls(
            features=rows.features,
            accepted_lens=rows.accepted_lens,
            num_judged=num.astype(np.int32),
            positions=rows.positions[np.arange(longest) < num[:, None]],
            # A copy, because a view would keep all positions in memory.
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
        """Index of each row's first judged token: int64[num_rows]."""
        return np.cumsum(self.num_judged, dtype=np.int64) - self.num_judged

    def select(self, rows: npt.NDArray[np.intp]) -> "Lessons":
        """The rows of these indices, in this order."""
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
        """At most num_rows random rows, without replacement."""
        if len(self) <= num_rows:
            return self
        return self.select(np.random.default_rng(seed).choice(len(self), num_rows, replace=False))

    def weighted(self, factor: float | npt.NDArray[np.float32]) -> "Lessons":
        """With all weights multiplied by a factor, or by one factor per row."""
        return replace(self, weights=(self.weights * factor).astype(np.float32))

    def unweighted(self) -> "Lessons":
        """With weight 1 for each row, as the paper's predictor is trained."""
        return replace(self, weights=np.ones(len(self), np.float32))
