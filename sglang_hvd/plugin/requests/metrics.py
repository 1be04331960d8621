"""Prometheus metrics of one scheduler process; SGLang's `/metrics` gathers them.

prometheus_client picks its storage when it is imported. SGLang must have set the shared directory
before, so that the import is here, where metrics are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_hvd.payoff import ModelFigures, OriginFigures
from sglang_hvd.step_clock import StepClock, StepTimes
from sglang_hvd.suffix_cache import SuffixCacheStats
from sglang_hvd.traces.recorder import RecorderStats
from sglang_hvd.types import SOURCES

if TYPE_CHECKING:
    from prometheus_client import Counter


class ServerMetrics:
    """Metrics of the cycles and steps of one scheduler process."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        self._num_requests = Gauge(
            "sglang:hvd_num_requests",
            "Requests whose tokens the HVD drafter holds. Zero when idle.",
            multiprocess_mode="livesum",
        )
        self._num_cycles = Counter(
            "sglang:hvd_cycles",
            "Decoding cycles, by the source of the verified draft.",
            labelnames=["source"],
        )
        self._num_accepted_drafts = Counter(
            "sglang:hvd_accepted_drafts",
            "Accepted draft tokens (bonus tokens not counted), by the source of the draft.",
            labelnames=["source"],
        )
        self._num_steps = Counter("sglang:hvd_steps", "Decode steps of the batch.")
        self._num_steps_ahead = Counter(
            "sglang:hvd_steps_ahead",
            "Decode steps that were launched before the tokens of the step before were known.",
        )
        self._step_seconds = Counter(
            "sglang:hvd_step_seconds", "Total duration of the decode steps."
        )
        self._host_seconds = Counter(
            "sglang:hvd_host_seconds",
            "Time that the host spent in HVD's own code during the decode steps, by phase.",
            labelnames=["phase"],
        )
        self._num_resyncs = Counter(
            "sglang:hvd_resyncs",
            "Requests whose tracked tokens diverged from SGLang's and were indexed again.",
        )
        self._cache_tokens = Gauge(
            "sglang:hvd_cache_tokens",
            "Tokens in the suffix cache: those of running requests, outputs of finished requests, "
            "and prompts that are kept for the next turns of their sessions.",
            labelnames=["kind"],
            multiprocess_mode="livesum",
        )
        self._cache_bytes = Gauge(
            "sglang:hvd_cache_bytes",
            "Memory of the suffix cache.",
            multiprocess_mode="livesum",
        )
        self._num_recorded = Counter(
            "sglang:hvd_recorder_requests",
            "Requests that ended while recording, by what became of them.",
            labelnames=["outcome"],
        )
        self._totals = _Totals()
        no_cycles = dict.fromkeys(SOURCES.labels, 0)
        self.publish(
            num_requests=0,
            num_cycles=no_cycles,
            num_accepted_drafts=no_cycles,
            num_resyncs=0,
            num_steps_ahead=0,
            times=StepClock().totals(),
            cache=None,
            recorder=None,
        )

    def publish(
        self,
        *,
        num_requests: int,
        num_cycles: Mapping[str, int],
        num_accepted_drafts: Mapping[str, int],
        num_resyncs: int,
        num_steps_ahead: int,
        times: StepTimes,
        cache: SuffixCacheStats | None,
        recorder: RecorderStats | None,
    ) -> None:
        """Sets the metrics to these totals, in some 50 microseconds.

        cache, recorder: None if the server has none.
        """
        self._num_requests.set(num_requests)
        for source in SOURCES.labels:
            self._totals.advance(self._num_cycles.labels(source), num_cycles[source])
            accepted = self._num_accepted_drafts.labels(source)
            self._totals.advance(accepted, num_accepted_drafts[source])
        self._totals.advance(self._num_steps, times.num_steps)
        self._totals.advance(self._num_steps_ahead, num_steps_ahead)
        self._totals.advance(self._step_seconds, times.step)
        for phase, seconds in times.phases.items():
            self._totals.advance(self._host_seconds.labels(phase.value), seconds)
        self._totals.advance(self._num_resyncs, num_resyncs)
        if cache is not None:
            for kind in ("request", "shared", "session"):
                num_tokens = getattr(cache, f"num_{kind}_tokens")
                self._cache_tokens.labels(kind).set(num_tokens)
            self._cache_bytes.set(cache.num_bytes)
        if recorder is not None:
            for outcome in ("recorded", "dropped"):
                counter = self._num_recorded.labels(outcome)
                self._totals.advance(counter, getattr(recorder, f"num_{outcome}"))


class PredictorMetrics:
    """Metrics of how accurate the predictions of one scheduler process are."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"sglang:hvd_{name}", text, labels, multiprocess_mode="livemostrecent")

        self._num_verified = Counter(
            "sglang:hvd_verified_cache_drafts",
            "Verified cache drafts, by where the match was found.",
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
            "fallback", "1 while the predictor is wrong and its predictions are ignored.", "origin"
        )
        self._bin_predicted = gauge(
            "reliability_predicted",
            "Mean predicted probability that a verified cache draft reaches the threshold, or six "
            "tokens if none is set.",
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
        self._totals = _Totals()
        self._fingerprint: str | None = None

    def publish(
        self,
        fingerprint: str,
        calibration: Mapping[str, OriginFigures],
        model_figures: ModelFigures | None,
    ) -> None:
        """Sets the metrics to these figures: of cache drafts by origin, and of model drafts."""
        if fingerprint != self._fingerprint:
            if self._fingerprint is not None:
                self._predictor.labels(self._fingerprint).set(0)
            self._totals.forget()  # another predictor counts from zero
            self._predictor.labels(fingerprint).set(1)
            self._fingerprint = fingerprint
        if model_figures is not None:
            self._model_predicted.set(_number(model_figures.mean_predicted))
            self._model_accepted.set(_number(model_figures.mean_accepted))
        for origin, figures in calibration.items():
            self._totals.advance(self._num_verified.labels(origin), figures.num_verified)
            self._predicted.labels(origin).set(_number(figures.mean_predicted))
            self._accepted.labels(origin).set(_number(figures.mean_accepted))
            self._shift.labels(origin).set(figures.shift)
            self._fallback.labels(origin).set(figures.is_fallback)
            for number, of_bin in enumerate(figures.bins):
                labels = (origin, str(number))
                self._bin_predicted.labels(*labels).set(_number(of_bin.mean_predicted))
                self._bin_share.labels(*labels).set(_number(of_bin.share))
                self._bin_weight.labels(*labels).set(of_bin.weight)


class _Totals:
    """Raises counters to given totals."""

    def __init__(self) -> None:
        self._of: dict[Counter, float] = {}

    def advance(self, counter: Counter, total: float) -> None:
        """Raises a counter to this total. A total below the last one counts from zero."""
        before = self._of.get(counter, 0)
        gained = total - before if total >= before else total
        if gained > 0:
            counter.inc(gained)
        self._of[counter] = total

    def forget(self) -> None:
        """From now on all totals count from zero."""
        self._of.clear()


def _number(mean: float | None) -> float:
    """The mean; NaN, which tells Prometheus that there is none."""
    return math.nan if mean is None else mean
