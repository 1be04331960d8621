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
    """Of a batch, in arrays, since what comes of them is taken in for all at once: entry i belongs
    to request i.

    drafts: of the cache.
    chain_lens: int32[num_requests], first tokens of the cache chain of which the cycle tells; a
        tree has branches beside them, and may have no others.
    chain_expected: float32[num_requests], accepted tokens that are expected of these. Not a number:
        those of the whole chain, which are known.
    branch_expected: float64[num_requests], the same of the branches, were the votes always right
        there.
    model_sizes: int32[num_requests], nodes of the model drafter's draft, 0 where it is not
        verified. In few steps it may have fewer.
    model_steps: int32[num_requests], steps that it comes from; no matter what where there is none.
    model_expected: float32[num_requests], accepted tokens that are expected of it. Not a number:
        those of the full size, which are known.
    """

    drafts: CacheDrafts
    chain_lens: Int32
    chain_expected: Float32
    branch_expected: npt.NDArray[np.float64]
    model_sizes: Int32
    model_steps: Int32
    model_expected: Float32

    @property
    def sources(self) -> list[DraftSource]:
        """By request."""
        return sources_of(self.drafts.num_nodes, self.model_sizes)

    def select(self, places: Sequence[int]) -> "Cycles":
        """Those of some of the requests."""
        some = (getattr(self, name)[places] for name in _ARRAYS)
        return Cycles(self.drafts.select(places), *some)

    @classmethod
    def concatenate(cls, parts: Sequence["Cycles"]) -> "Cycles":
        """Those of several batches, of one at least."""
        drafts = CacheDrafts.concatenate([part.drafts for part in parts])
        return cls(
            drafts, *(np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS)
        )


_ARRAYS = tuple(field.name for field in fields(Cycles) if field.name != "drafts")
