"""What the cycles under way verify of their drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from sglang_hvd.types import CacheDrafts, DraftSource, sources_of

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Cycles:
    """The cycles of a batch, in arrays, since what comes of them is taken in for all at once.
    Entry i belongs to request i.

    drafts: parts of the cache drafts to verify.
    chain_lens: int32[num_requests], leading chain tokens that this cycle gives evidence about:
        those verified, or 1 where a branch alone was verified, since the first committed token
        shows whether the chain's first was right.
    chain_expected: float32[num_requests], expected accepted tokens of these. Not a number: the
        prediction for the whole chain counts, which the calibration has.
    model_sizes: int32[num_requests], nodes of the model drafter's draft, 0 where it is not
        verified. In few steps it may have fewer.
    model_steps: int32[num_requests], steps that it comes from; unspecified where it is not
        verified.
    model_expected: float32[num_requests], expected accepted tokens of it. Not a number: the
        prediction for the full size counts, which ModelPredictor has.
    """

    drafts: CacheDrafts
    chain_lens: Int32
    chain_expected: Float32
    model_sizes: Int32
    model_steps: Int32
    model_expected: Float32

    @property
    def sources(self) -> list[DraftSource]:
        """What each request verifies: list[num_requests]."""
        return sources_of(self.drafts.num_nodes, self.model_sizes)

    def select(self, places: Sequence[int]) -> "Cycles":
        """The cycles of some of the requests."""
        some = (getattr(self, name)[places] for name in _ARRAYS)
        return Cycles(self.drafts.select(places), *some)

    @classmethod
    def concatenate(cls, parts: Sequence["Cycles"]) -> "Cycles":
        """The cycles of one batch or more, one after the other."""
        drafts = CacheDrafts.concatenate([part.drafts for part in parts])
        return cls(
            drafts, *(np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS)
        )


_ARRAYS = tuple(field.name for field in fields(Cycles) if field.name != "drafts")
