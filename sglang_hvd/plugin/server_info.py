"""What HVD is doing, in `/server_info` and in Prometheus metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_hvd.types import DraftSource

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController,
    )


def add_hvd_state(
    output: GetInternalStateReqOutput, controller: SchedulerInternalStateController, _request: Any
) -> None:
    """AFTER hook of get_internal_state: `/server_info` -> internal_states[rank]["hvd"]."""
    from sglang_hvd.plugin.worker import HvdWorker

    worker = controller.scheduler.draft_worker
    if isinstance(worker, HvdWorker):
        output.internal_state["hvd"] = worker.describe()


def let_go_when_idle(_result: None, scheduler: Scheduler) -> None:
    """AFTER hook of Scheduler.on_idle."""
    from sglang_hvd.plugin.worker import HvdWorker

    if isinstance(scheduler.draft_worker, HvdWorker):
        scheduler.draft_worker.on_idle()


class HvdMetrics:
    """Prometheus metrics of one scheduler process; SGLang's `/metrics` gathers them."""

    def __init__(self) -> None:
        # prometheus_client picks its storage at import, after SGLang set the shared directory.
        from prometheus_client import Counter, Gauge

        self._num_requests = Gauge(
            "sglang:hvd_num_requests",
            "Requests whose tokens the HVD drafter holds; zero when idle.",
            multiprocess_mode="livesum",
        )
        self._num_cycles = Counter(
            "sglang:hvd_cycles",
            "Decoding cycles by the draft that was verified.",
            labelnames=["source"],
        )
        self._num_accepted_drafts = Counter(
            "sglang:hvd_accepted_drafts",
            "Accepted draft tokens (bonus token not counted) by draft source.",
            labelnames=["source"],
        )
        for source in DraftSource:
            self._num_cycles.labels(source.value)
            self._num_accepted_drafts.labels(source.value)
        self.set_num_requests(0)

    def set_num_requests(self, num_requests: int) -> None:
        """Requests held now."""
        self._num_requests.set(num_requests)

    def count_cycle(self, source: DraftSource, num_accepted_drafts: int) -> None:
        """One request's cycle."""
        self._num_cycles.labels(source.value).inc()
        self._num_accepted_drafts.labels(source.value).inc(num_accepted_drafts)
