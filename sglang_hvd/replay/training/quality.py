"""How well predicted payoffs find the cache drafts worth verifying (paper, section 5.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_BINS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """A predictor's predictions for some drafts, and the drafts' true accepted lengths.

    payoffs: float32[num_drafts], predicted accepted lengths, which the gate compares with its
        threshold.
    probs: float32[num_drafts], predicted probabilities that the accepted length reaches the
        threshold; None from a predictor of bare numbers.
    accepted_lens: int32[num_drafts], true accepted lengths.
    """

    payoffs: npt.NDArray[np.float32]
    probs: npt.NDArray[np.float32] | None
    accepted_lens: npt.NDArray[np.int32]

    @classmethod
    def concatenate(cls, parts: Sequence["Judgement"]) -> "Judgement":
        """All drafts of the parts, in order. One predictor must have judged all parts."""
        probs = [part.probs for part in parts if part.probs is not None]
        return cls(
            np.concatenate([part.payoffs for part in parts]),
            np.concatenate(probs) if probs else None,
            np.concatenate([part.accepted_lens for part in parts]),
        )

    @property
    def ranking(self) -> npt.NDArray[np.float32]:
        """The values that best tell the drafts worth verifying from the others."""
        return self.payoffs if self.probs is None else self.probs

    def every(self, stride: int) -> "Judgement":
        """One draft in `stride`."""
        probs = None if self.probs is None else self.probs[::stride]
        return Judgement(self.payoffs[::stride], probs, self.accepted_lens[::stride])


@dataclass(frozen=True, slots=True)
class PayoffQuality:
    """How well a predictor finds the drafts whose accepted length reaches the threshold.

    oracle_share: share of the drafts that reach the threshold.
    precision, recall: of the selected drafts. A draft is selected if it is more likely than not to
        reach the threshold, or, without probabilities, if its predicted length reaches it.
        precision is None if no draft is selected, and recall is None if no draft reaches it.
    average_precision: area under precision over recall; None if no draft reaches the threshold.
    roc_auc: probability that a draft that reaches the threshold ranks above one that does not;
        None if all drafts reach it or none does.
    precision_at_recall_60, precision_at_recall_78: highest precision with a recall of at least .6
        and .78; None if no draft reaches the threshold.
    calibration_error: largest difference between mean predicted probability and true share in any
        tenth of the drafts; None without probabilities.
    mean_absolute_error: of the predicted accepted length, in tokens.
    """

    num_drafts: int
    oracle_share: float
    precision: float | None
    recall: float | None
    average_precision: float | None
    roc_auc: float | None
    precision_at_recall_60: float | None
    precision_at_recall_78: float | None
    calibration_error: float | None
    mean_absolute_error: float


def payoff_quality(judgement: Judgement, *, threshold: float) -> PayoffQuality:
    """Compares predicted with true accepted lengths. Raises ValueError if there are no drafts."""
    accepted_lens = judgement.accepted_lens
    if not len(accepted_lens):
        raise ValueError("no drafts to measure")
    worth = accepted_lens >= threshold
    probs = judgement.probs
    selected = judgement.payoffs >= threshold if probs is None else probs >= 0.5
    num_hits, num_worth, num_selected = (worth & selected).sum(), worth.sum(), selected.sum()
    curve = _precision_recall(judgement.ranking, worth) if num_worth else None
    return PayoffQuality(
        num_drafts=len(worth),
        oracle_share=float(worth.mean()),
        precision=float(num_hits / num_selected) if num_selected else None,
        recall=float(num_hits / num_worth) if num_worth else None,
        average_precision=None if curve is None else _average_precision(*curve),
        roc_auc=_roc_auc(judgement.ranking, worth) if 0 < num_worth < len(worth) else None,
        precision_at_recall_60=None if curve is None else _precision_at(0.6, *curve),
        precision_at_recall_78=None if curve is None else _precision_at(0.78, *curve),
        calibration_error=None if probs is None else _calibration_error(probs, worth),
        mean_absolute_error=float(np.abs(judgement.payoffs - accepted_lens).mean()),
    )


def reliability_curve(
    probs: npt.NDArray[np.float32], happened: npt.NDArray[np.bool_]
) -> list[tuple[float, float, int]]:
    """Mean prediction, true share and number of drafts in each of NUM_BINS equally large groups, by
    rising prediction. Equal predictions may fall into different groups."""
    order = np.argsort(probs, kind="stable")
    return [
        (float(probs[group].mean()), float(happened[group].mean()), len(group))
        for group in np.array_split(order, NUM_BINS)
        if len(group)
    ]


def precision_at_recalls(
    ranking: npt.NDArray[np.float32], worth: npt.NDArray[np.bool_], recalls: Sequence[float]
) -> tuple[float, ...]:
    """The highest precision with at least each recall, over all thresholds.

    Raises ValueError if no draft is worth verifying.
    """
    if not worth.any():
        raise ValueError("no draft is worth verifying, so there is no recall")
    curve = _precision_recall(ranking, worth)
    return tuple(_precision_at(wanted, *curve) for wanted in recalls)


def _calibration_error(probs: npt.NDArray[np.float32], happened: npt.NDArray[np.bool_]) -> float:
    return max(abs(mean - share) for mean, share, _ in reliability_curve(probs, happened))


def _precision_recall(
    ranking: npt.NDArray[np.float32], worth: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Precision and recall if all drafts from a value up are selected, for each distinct value,
    highest first."""
    order = np.argsort(-ranking, kind="stable")
    hits = np.cumsum(worth[order])
    is_last_of_ties = np.append(np.diff(ranking[order]) != 0, True)
    ranks = np.flatnonzero(is_last_of_ties)
    return hits[ranks] / (ranks + 1), hits[ranks] / hits[-1]


def _precision_at(
    wanted: float, precision: npt.NDArray[np.float64], recall: npt.NDArray[np.float64]
) -> float:
    """The highest precision with at least that recall."""
    return float(precision[recall >= wanted].max())


def _average_precision(
    precision: npt.NDArray[np.float64], recall: npt.NDArray[np.float64]
) -> float:
    """Sum of precision times gain in recall over the distinct values, highest first."""
    return float((precision * np.diff(recall, prepend=0)).sum())


def _roc_auc(ranking: npt.NDArray[np.float32], worth: npt.NDArray[np.bool_]) -> float:
    """Area under the ROC curve from the drafts' ranks (Mann-Whitney); a tie counts half."""
    _, group, sizes = np.unique(ranking, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[group]
    num_worth = worth.sum()
    above = ranks[worth].sum() - num_worth * (num_worth + 1) / 2
    return float(above / (num_worth * (len(worth) - num_worth)))
