"""Cache drafts with what the target model made of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.payoff.features import POSITION_FEATURES
from sglang_hvd.payoff.predictor import PayoffPredictor, Prediction
from sglang_hvd.payoff.tracker import DraftFeatures

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRows:
    """One row per cache draft.

    features: float32[num_rows, len(FEATURE_NAMES)].
    positions: float32[num_rows, longest, len(POSITION_FEATURES)].
    draft_lens, accepted_lens: int32[num_rows], tokens proposed, and those the target would accept.
        Where the text ends inside a draft none of the rest is; where it was cut there, the draft's
        tokens before the cut are all that count.
    is_verified: bool[num_rows], whether it was the draft that was verified.
    is_worth_known: bool[num_rows], whether it is known if it was worth its verification: not where
        the text was cut inside its first six tokens.
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
        """Some of the rows."""
        return TrainingRows(
            self.features[rows],
            self.positions[rows],
            self.draft_lens[rows],
            self.accepted_lens[rows],
            self.is_verified[rows],
            self.is_worth_known[rows],
        )

    def sample(self, num_rows: int, seed: int) -> "TrainingRows":
        """At most num_rows of them, without replacement."""
        if len(self) <= num_rows:
            return self
        return self.select(np.random.default_rng(seed).choice(len(self), num_rows, replace=False))

    def predict(self, predictor: PayoffPredictor) -> Prediction:
        """What a predictor says of every row."""
        parts = []
        for first in range(0, len(self), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            drafts = DraftFeatures.of_size(len(self.draft_lens[rows]))
            drafts.draft_lens[:] = self.draft_lens[rows]
            drafts.features[:] = self.features[rows]
            of_tokens = self.positions[rows].transpose(0, 2, 1)
            drafts.positions[:, :, : of_tokens.shape[2]] = of_tokens
            parts.append(predictor.predict(drafts))
        survival = [part.survival for part in parts if part.survival is not None]
        return Prediction(
            np.concatenate([part.payoffs for part in parts]),
            np.concatenate(survival) if survival else None,
        )
