"""How well predicted payoffs find the cache drafts worth verifying (paper, section 5.3)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PayoffQuality:
    """A predictor's decisions against the drafts whose accepted length reaches the threshold.

    oracle_share: share of the drafts that reach it.
    precision: share of the selected drafts that reach it; None if none is selected.
    recall: share of the drafts that reach it which are selected; None if none reaches it.
    average_precision: area under precision over recall for all thresholds; None likewise.
    mean_absolute_error: of the predicted accepted length, in tokens.
    """

    num_drafts: int
    oracle_share: float
    precision: float | None
    recall: float | None
    average_precision: float | None
    mean_absolute_error: float


def payoff_quality(
    predicted: npt.NDArray[np.float32], accepted_lens: npt.NDArray[np.int32], *, threshold: float
) -> PayoffQuality:
    """Compares predicted with real accepted lengths, float32 and int32 [num_drafts].

    Raises ValueError if there are no drafts.
    """
    if not len(predicted):
        raise ValueError("no drafts to measure")
    worth, selected = accepted_lens >= threshold, predicted >= threshold
    num_hits, num_worth, num_selected = (worth & selected).sum(), worth.sum(), selected.sum()
    return PayoffQuality(
        num_drafts=len(predicted),
        oracle_share=float(worth.mean()),
        precision=float(num_hits / num_selected) if num_selected else None,
        recall=float(num_hits / num_worth) if num_worth else None,
        average_precision=_average_precision(predicted, worth) if num_worth else None,
        mean_absolute_error=float(np.abs(predicted - accepted_lens).mean()),
    )


def _average_precision(predicted: npt.NDArray[np.float32], worth: npt.NDArray[np.bool_]) -> float:
    """Sum over the distinct predictions, highest first, of precision x gain in recall."""
    order = np.argsort(-predicted, kind="stable")
    hits = np.cumsum(worth[order])
    is_last_of_ties = np.append(np.diff(predicted[order]) != 0, True)
    ranks = np.flatnonzero(is_last_of_ties)
    precision = hits[ranks] / (ranks + 1)
    gained = np.diff(hits[ranks], prepend=0) / hits[-1]
    return float((precision * gained).sum())
