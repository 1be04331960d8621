"""Limits of requests whose drafts are fixed."""

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import RowLimits


def of_model_only(are_fixed: npt.NDArray[np.bool_], whole: int) -> RowLimits:
    """These requests verify the model drafter's whole draft alone; the others are not limited."""
    num = len(are_fixed)
    return RowLimits(
        are_fixed,
        np.zeros(num, np.int32),
        np.where(are_fixed, whole, 0).astype(np.int32),
        np.full(num, 2**30, np.int32),
    )
