"""What the suffix cache proposes to a batch, and what is expected of it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.drafter.forecasts import AllocationForecast, PayoffForecast
from sglang_hvd.payoff import DraftFeatures
from sglang_hvd.types import DraftBatch


@dataclass(frozen=True, slots=True, eq=False)
class Proposals:
    """Row i belongs to request i. The arrays are the proposer's own: they hold until its next
    proposals.

    drafts: cache drafts; num_nodes is 0 where the cache proposes nothing.
    features: the predictor's inputs; None in a drafter without token classes.
    forecast: what the policy decides by; None for a policy that predicts nothing.
    """

    num_requests: int
    drafts: DraftBatch
    features: DraftFeatures | None = None
    forecast: PayoffForecast | AllocationForecast | None = None

    @property
    def has_draft(self) -> npt.NDArray[np.bool_]:
        """Whether the cache proposes a draft: bool[num_requests]."""
        return self.drafts.num_nodes[: self.num_requests] > 0

    def where_drafted(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The values of requests with a cache draft, not a number for the others:
        float32[num_requests]."""
        return np.where(self.has_draft, values, np.float32(np.nan))
