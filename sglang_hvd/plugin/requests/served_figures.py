"""Counters of one scheduler process, for /server_info and the Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.plugin.requests.recording import RequestRecorder
from sglang_hvd.step_clock import StepClock
from sglang_hvd.types import SOURCES

if TYPE_CHECKING:
    from sglang_hvd.plugin.requests.metrics import Metrics


class ServedFigures:
    """Counts the steps that ran ahead and the resyncs, and publishes them with what others count.

    num_steps_ahead: steps that were launched before the tokens of the step before were known.
    """

    def __init__(
        self,
        drafter: HybridDrafter,
        *,
        clock: StepClock,
        recorder: RequestRecorder | None,
        metrics: Metrics | None,
    ) -> None:
        self._drafter, self._clock = drafter, clock
        self._recorder, self._metrics = recorder, metrics
        self._num_resyncs = 0
        self.num_steps_ahead = 0
        self.publish(0)

    def count_resync(self) -> None:
        """Counts a request whose tracked tokens diverged from SGLang's and were indexed again."""
        self._num_resyncs += 1

    def publish(self, num_requests: int) -> None:
        """Brings the Prometheus metrics up to date. num_requests: number of held requests."""
        if self._metrics is None:
            return
        times, cache = self._clock.totals(), self._drafter.cache_stats()
        of_all = self._drafter.stats_of_all()
        figures: dict[str, float | Mapping[str, float] | Sequence[float]] = {
            "num_requests": num_requests,
            "cycles": _by_label(of_all.num_cycles),
            "accepted_drafts": _by_label(of_all.num_accepted_drafts),
            "steps": times.num_steps,
            "steps_ahead": self.num_steps_ahead,
            "step_seconds": times.step,
            "host_seconds": {phase.value: spent for phase, spent in times.phases.items()},
            "gap_seconds": self._clock.new_gaps(),
            "resyncs": self._num_resyncs,
            "cache_tokens": {
                "request": cache.num_request_tokens,
                "shared": cache.num_shared_tokens,
                "session": cache.num_session_tokens,
            },
            "cache_bytes": cache.num_bytes,
        }
        if self._recorder is not None:
            stats = self._recorder.stats()
            figures["recorder_requests"] = {
                "recorded": stats.num_recorded,
                "dropped": stats.num_dropped,
            }
        self._metrics.publish(figures)

    def describe(self, num_requests: int) -> dict[str, Any]:
        """The counts for /server_info, as JSON values. num_requests: number of held requests."""
        cache, of_all = self._drafter.cache_stats(), self._drafter.stats_of_all()
        return {
            "num_requests": num_requests,
            "num_resyncs": self._num_resyncs,
            "num_steps_ahead": self.num_steps_ahead,
            "num_cycles": _by_label(of_all.num_cycles),
            "num_accepted_drafts": _by_label(of_all.num_accepted_drafts),
            "num_request_tokens": cache.num_request_tokens,
            "num_shared_requests": cache.num_shared_requests,
            "num_shared_tokens": cache.num_shared_tokens,
            "num_namespaces": cache.num_namespaces,
            "num_session_tokens": cache.num_session_tokens,
            "num_pending_tokens": cache.num_pending_tokens,
            "num_cache_bytes": cache.num_bytes,
            "steps": self._clock.describe(),
            "recorder": asdict(self._recorder.stats()) if self._recorder is not None else None,
        }


def _by_label(counts: Mapping[str, int]) -> dict[str, int]:
    return {label: counts.get(label, 0) for label in SOURCES.labels}
