"""Prometheus metrics of one scheduler process; SGLang's `/metrics` gathers them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sglang_hvd.payoff import ModelFigures, OriginFigures

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Its name gets the prefix "sglang:hvd_"; Prometheus appends "_total" to a counter.

    labels: names of the labels.
    merged: how the gauges of several processes become one; None for any other metric.
    buckets: upper bounds of a histogram's buckets; None for any other metric.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()
    merged: Literal["livesum", "livemostrecent"] | None = None
    buckets: tuple[float, ...] | None = None


class Metrics:
    """The metrics of a table, as prometheus_client has them.

    prometheus_client picks its storage when it is imported. SGLang must set the shared directory
    first, so the import is here and not at the top of the file.
    """

    def __init__(self, table: tuple[Metric, ...]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        for row in table:
            named = f"sglang:hvd_{row.name}", row.text, row.labels
            if row.buckets is not None:
                self._metrics[row.name] = Histogram(*named, buckets=row.buckets)
            elif row.merged is not None:
                self._metrics[row.name] = Gauge(*named, multiprocess_mode=row.merged)
            else:
                self._metrics[row.name] = Counter(*named)
        self._gauges = {row.name for row in table if row.merged is not None}
        self._totals: dict[Any, float] = {}

    def publish(
        self, figures: Mapping[str, float | Mapping[Any, float | None] | Sequence[float] | None]
    ) -> None:
        """Sets metrics, in some 50 microseconds.

        figures: for each name of a metric, its value, or its values by label or by tuple of labels.
            The value of a counter is its total; a total below the last one counts from zero. None:
            a gauge without a value. Of a histogram, the values since the last call.
        """
        for name, found in figures.items():
            metric: Any = self._metrics[name]
            if isinstance(found, Sequence):
                for observed in found:
                    metric.observe(observed)
                continue
            if not isinstance(found, Mapping):
                self._set(name, metric, found)
                continue
            for label, value in found.items():
                labels = label if isinstance(label, tuple) else (label,)
                self._set(name, metric.labels(*labels), value)

    def forget_totals(self) -> None:
        """From now on all totals count from zero."""
        self._totals.clear()

    def _set(self, name: str, metric: Any, value: float | None) -> None:
        if name in self._gauges:
            metric.set(math.nan if value is None else value)
            return
        assert value is not None, f"the counter {name} has no total"
        before = self._totals.get(metric, 0)
        gained = value - before if value >= before else value
        if gained > 0:
            metric.inc(gained)
        self._totals[metric] = value


_GAP_SECONDS = (0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.01, 0.03, 0.1)

# ServedFigures publishes these.
SERVER_METRICS = (
    Metric(
        "num_requests",
        "Requests whose tokens the HVD drafter holds. Zero when idle.",
        merged="livesum",
    ),
    Metric("cycles", "Decoding cycles, by the source of the verified draft.", ("source",)),
    Metric(
        "accepted_drafts",
        "Accepted draft tokens (bonus tokens not counted), by the source of the draft.",
        ("source",),
    ),
    Metric("steps", "Decode steps of the batch."),
    Metric(
        "steps_ahead",
        "Decode steps that were launched before the tokens of the step before were known.",
    ),
    Metric("step_seconds", "Total duration of the decode steps."),
    Metric(
        "host_seconds",
        "Time that the host spent in HVD's own code during the decode steps, by phase.",
        ("phase",),
    ),
    Metric(
        "gap_seconds",
        "Host time between a step's tokens and the next verification.",
        buckets=_GAP_SECONDS,
    ),
    Metric(
        "resyncs", "Requests whose tracked tokens diverged from SGLang's and were indexed again."
    ),
    Metric(
        "cache_tokens",
        "Tokens in the suffix cache: those of running requests, outputs of finished requests, "
        "and prompts that are kept for the next turns of their sessions.",
        ("kind",),
        "livesum",
    ),
    Metric("cache_bytes", "Memory of the suffix cache.", merged="livesum"),
    Metric(
        "recorder_requests",
        "Requests that ended while recording, by what became of them.",
        ("outcome",),
    ),
)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, text, labels, "livemostrecent")


# PredictorMetrics publishes these.
PREDICTOR_METRICS = (
    Metric(
        "verified_cache_drafts",
        "Verified cache drafts, by where the match was found.",
        ("origin",),
    ),
    _gauge("predictor", "1 for the predictor in use.", "fingerprint"),
    _gauge("predicted_len", "Mean predicted length of the latest verified cache drafts.", "origin"),
    _gauge("accepted_len", "Mean accepted length of the latest verified cache drafts.", "origin"),
    _gauge("shift", "Correction of the predictor, in log odds.", "origin"),
    _gauge("fallback", "1 while the predictor is wrong and its predictions are ignored.", "origin"),
    _gauge(
        "reliability_predicted",
        "Mean predicted probability that a verified cache draft reaches the threshold, or six "
        "tokens if none is set.",
        *("origin", "bin"),
    ),
    _gauge(
        "reliability_share",
        "Share of the verified cache drafts of a bin that reached the threshold.",
        *("origin", "bin"),
    ),
    _gauge("reliability_weight", "Number of verified cache drafts of a bin.", "origin", "bin"),
    _gauge("model_predicted_len", "Mean predicted length of the model drafter's latest drafts."),
    _gauge("model_accepted_len", "Mean accepted length of the model drafter's latest drafts."),
)


class PredictorMetrics:
    """How accurate the predictions of one scheduler process are."""

    def __init__(self) -> None:
        self._metrics = Metrics(PREDICTOR_METRICS)
        self._are_used: dict[str, bool] = {}  # by fingerprint: each predictor so far

    def publish(
        self,
        fingerprint: str,
        calibration: Mapping[str, OriginFigures],
        model_figures: ModelFigures | None,
    ) -> None:
        """Sets the metrics to these figures: of cache drafts by origin, and of model drafts.
        Another predictor counts from zero."""
        if not self._are_used.get(fingerprint):
            self._metrics.forget_totals()
            self._are_used = {**dict.fromkeys(self._are_used, False), fingerprint: True}
        bins = {
            (origin, str(number)): of_bin
            for origin, figures in calibration.items()
            for number, of_bin in enumerate(figures.bins)
        }
        self._metrics.publish(
            {
                "predictor": self._are_used,
                "verified_cache_drafts": {o: f.num_verified for o, f in calibration.items()},
                "predicted_len": {o: f.mean_predicted for o, f in calibration.items()},
                "accepted_len": {o: f.mean_accepted for o, f in calibration.items()},
                "shift": {o: f.shift for o, f in calibration.items()},
                "fallback": {o: f.is_fallback for o, f in calibration.items()},
                "reliability_predicted": {key: b.mean_predicted for key, b in bins.items()},
                "reliability_share": {key: b.share for key, b in bins.items()},
                "reliability_weight": {key: b.weight for key, b in bins.items()},
            }
        )
        if model_figures is not None:
            self._metrics.publish(
                {
                    "model_predicted_len": model_figures.mean_predicted,
                    "model_accepted_len": model_figures.mean_accepted,
                }
            )
