"""The payoff predictor of a server: its file, how accurate it is, and its replacement."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff.predictor import predictor_file
from sglang_hvd.plugin.device.rank_group import RankGroup

if TYPE_CHECKING:
    from sglang_hvd.plugin.requests.metrics import PredictorMetrics

logger = logging.getLogger(__name__)


class ServedPredictor:
    """The predictor of the drafter of one scheduler process."""

    def __init__(
        self,
        drafter: HybridDrafter,
        config: HvdConfig,
        *,
        ranks: RankGroup,
        metrics: PredictorMetrics | None,
    ) -> None:
        self._drafter = drafter
        self._ranks = ranks
        self._metrics = metrics
        self._file = predictor_file(config)
        self._fingerprint = _fingerprint(drafter)

    def replace(self, path: Path) -> None:
        """Predicts with another predictor from the next step on. All ranks call this between the
        same two steps.

        Raises ValueError, in one line and on every rank, if any rank cannot use the file, or if
        they do not all read the same content. Then the old predictor stays.
        """
        predictor, fingerprint, fault = None, "", ""
        try:
            predictor = self._drafter.read_predictor(path)
            fingerprint = predictor.fingerprint
        except ValueError as error:
            fault = str(error)
        except Exception as error:  # the other ranks would wait forever for a rank that left here
            logger.exception("HVD: predictor %s", path)
            fault = f"predictor {path}: {type(error).__name__}: {error}"
        found = self._ranks.of_all((fingerprint, fault))
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
        """Brings the Prometheus metrics up to date."""
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
        model_figures = self._drafter.model_figures()
        return {
            "file": str(self._file),
            "fingerprint": self._fingerprint,
            "calibration": None
            if figures is None
            else {origin: asdict(of_origin) for origin, of_origin in figures.items()},
            "model_drafter": None if model_figures is None else asdict(model_figures),
        }


def _fingerprint(drafter: HybridDrafter) -> str | None:
    return None if drafter.predictor is None else drafter.predictor.fingerprint
