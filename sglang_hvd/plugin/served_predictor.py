"""The payoff predictor of a server: which it is, how right it is, and another one instead."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed

from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import DEFAULT_PREDICTORS, ModelFigures, OriginFigures

if TYPE_CHECKING:
    from prometheus_client import Counter

logger = logging.getLogger(__name__)


class ServedPredictor:
    """The predictor of a drafter that one scheduler process has."""

    def __init__(
        self,
        drafter: HybridDrafter,
        config: HvdConfig,
        *,
        ranks: torch.distributed.ProcessGroup | None,
        metrics: PredictorMetrics | None,
    ) -> None:
        """
        Args:
            ranks: the tensor-parallel ranks; None: this process alone.
        """
        self._drafter = drafter
        self._ranks = ranks
        self._metrics = metrics
        self._file = config.predictor or DEFAULT_PREDICTORS[config.cache_mode]
        self._fingerprint = _fingerprint(drafter)

    def replace(self, path: Path) -> None:
        """Predict with another one from the next step on; all ranks call this between the same
        two steps.

        Raises ValueError, in one line and on all ranks alike, if any of them cannot use the file,
        or if they do not read the same; then the old one stays.
        """
        predictor, fingerprint, fault = None, "", ""
        try:
            predictor = self._drafter.read_predictor(path)
            fingerprint = predictor.fingerprint
        except ValueError as error:
            fault = str(error)
        except Exception as error:  # a rank that left here would let the others wait for ever
            logger.exception("HVD: predictor %s", path)
            fault = f"predictor {path}: {type(error).__name__}: {error}"
        found = _of_all_ranks((fingerprint, fault), self._ranks)
        for _, fault in found:
            if fault:
                raise ValueError(fault)
        if len(set(found)) > 1:
            raise ValueError(f"predictor {path} is not the same on all ranks: copy it to all hosts")
        assert predictor is not None, "this rank read none and found no fault"
        self._drafter.use_predictor(predictor)
        logger.info("HVD: predictor %s (%s) in place of %s", path, fingerprint, self._file)
        self._file, self._fingerprint = path, fingerprint

    def publish(self) -> None:
        """Bring the Prometheus metrics up to date."""
        if self._metrics is not None and self._fingerprint is not None:
            self._metrics.publish(
                self._fingerprint,
                self._drafter.calibration() or {},
                self._drafter.model_figures(),
            )

    def describe(self) -> dict[str, Any] | None:
        """For /server_info; plain values. None without a predictor."""
        if self._fingerprint is None:
            return None
        figures = self._drafter.calibration()
        of_model = self._drafter.model_figures()
        return {
            "file": str(self._file),
            "fingerprint": self._fingerprint,
            "calibration": None
            if figures is None
            else {origin: asdict(of_origin) for origin, of_origin in figures.items()},
            "model_drafter": None if of_model is None else asdict(of_model),
            "branch_share": self._drafter.branch_share(),
        }


class PredictorMetrics:
    """Prometheus metrics of one scheduler process; SGLang's `/metrics` gathers them."""

    def __init__(self) -> None:
        # prometheus_client picks its storage at import, after SGLang set the shared directory.
        from prometheus_client import Counter, Gauge

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"sglang:hvd_{name}", text, labels, multiprocess_mode="livemostrecent")

        self._num_verified = Counter(
            "sglang:hvd_verified_cache_drafts",
            "Verified cache drafts, by where they were found.",
            labelnames=["origin"],
        )
        self._predictor = gauge("predictor", "1 for the predictor in use.", "fingerprint")
        self._predicted = gauge(
            "predicted_len", "Mean predicted length of the latest verified cache drafts.", "origin"
        )
        self._accepted = gauge(
            "accepted_len", "Mean accepted length of the latest verified cache drafts.", "origin"
        )
        self._shift = gauge("shift", "Correction of the predictor, in log odds.", "origin")
        self._fallback = gauge(
            "fallback", "1 where the frequency policy decides: the predictor is off.", "origin"
        )
        self._bin_predicted = gauge(
            "reliability_predicted",
            "Mean predicted probability that a verified cache draft reaches the threshold, six "
            "tokens where there is none.",
            *("origin", "bin"),
        )
        self._bin_share = gauge(
            "reliability_share", "Share of these drafts that reached it.", "origin", "bin"
        )
        self._bin_weight = gauge("reliability_weight", "Number of these drafts.", "origin", "bin")
        self._model_predicted = gauge(
            "model_predicted_len", "Mean predicted length of the model drafter's latest drafts."
        )
        self._model_accepted = gauge(
            "model_accepted_len", "Mean accepted length of the model drafter's latest drafts."
        )
        self._totals: dict[Counter, int] = {}
        self._fingerprint: str | None = None

    def publish(
        self,
        fingerprint: str,
        calibration: Mapping[str, OriginFigures],
        of_model: ModelFigures | None,
    ) -> None:
        """Set the metrics to these figures: of cache drafts by origin, and of model drafts."""
        if fingerprint != self._fingerprint:
            if self._fingerprint is not None:
                self._predictor.labels(self._fingerprint).set(0)
            self._totals.clear()  # another predictor counts from zero
            self._predictor.labels(fingerprint).set(1)
            self._fingerprint = fingerprint
        if of_model is not None:
            self._model_predicted.set(_number(of_model.mean_predicted))
            self._model_accepted.set(_number(of_model.mean_accepted))
        for origin, figures in calibration.items():
            self._count(self._num_verified.labels(origin), figures.num_verified)
            self._predicted.labels(origin).set(_number(figures.mean_predicted))
            self._accepted.labels(origin).set(_number(figures.mean_accepted))
            self._shift.labels(origin).set(figures.shift)
            self._fallback.labels(origin).set(figures.is_fallback)
            for number, of_bin in enumerate(figures.bins):
                labels = (origin, str(number))
                self._bin_predicted.labels(*labels).set(_number(of_bin.mean_predicted))
                self._bin_share.labels(*labels).set(_number(of_bin.share))
                self._bin_weight.labels(*labels).set(of_bin.weight)

    def _count(self, counter: Counter, total: int) -> None:
        before = self._totals.get(counter, 0)
        counter.inc(total - before if total >= before else total)
        self._totals[counter] = total


def _fingerprint(drafter: HybridDrafter) -> str | None:
    return None if drafter.predictor is None else drafter.predictor.fingerprint


def _number(mean: float | None) -> float:
    """As Prometheus says that there is none."""
    return math.nan if mean is None else mean


def _of_all_ranks(
    found: tuple[str, str], ranks: torch.distributed.ProcessGroup | None
) -> list[tuple[str, str]]:
    """What each rank found, in the order of the ranks."""
    if ranks is None:
        return [found]
    everywhere: list[Any] = [None] * torch.distributed.get_world_size(ranks)
    torch.distributed.all_gather_object(everywhere, found, group=ranks)
    return everywhere
