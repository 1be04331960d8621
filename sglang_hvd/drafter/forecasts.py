"""What is expected of the drafts of a batch before a policy decides on them.

Row i belongs to request i. The arrays hold until the next forecast.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import CacheTrees
from sglang_hvd.payoff import ModelAcceptance, Prediction

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PayoffForecast:
    """What policy payoff decides by.

    prediction: calibrated prediction for the cache drafts.
    model_payoffs: float32[num_requests], expected accepted length of the model drafter's draft in
        tokens.
    """

    prediction: Prediction
    model_payoffs: Float32


@dataclass(frozen=True, slots=True, eq=False)
class AllocationForecast:
    """What policy allocate decides by.

    slots: int32[num_requests], by which the allocator knows the requests.
    prediction: calibrated prediction for the chains that the cache proposes, of a predictor that
        knows distributions.
    trees: cache drafts to choose from. Their probabilities are the prediction's, but the suffix
        cache's own where the predictor is not heeded.
    model_reaches: how far the model drafter's draft is expected to be accepted, by its size.
    """

    slots: npt.NDArray[np.int32]
    prediction: Prediction
    trees: CacheTrees
    model_reaches: ModelAcceptance

    @property
    def prediction_survival(self) -> Float32:
        """The prediction's survival: float32[num_requests, MAX_DRAFT_LEN]."""
        assert self.prediction.acceptance is not None, (
            "AcceptancePredictor.of_config refuses others"
        )
        return self.prediction.acceptance
