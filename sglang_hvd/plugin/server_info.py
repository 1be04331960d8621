"""What HVD is doing, in `/server_info` and in Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_hvd.step_clock import StepClock, StepTimes
from sglang_hvd.types import DraftSource

if TYPE_CHECKING:
    from prometheus_client import Counter
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
        self._num_steps = Counter("sglang:hvd_steps", "Decode steps of the batch.")
        self._step_seconds = Counter(
            "sglang:hvd_step_seconds", "Duration of the decode steps, all together."
        )
        self._host_seconds = Counter(
            "sglang:hvd_host_seconds",
            "What the host spent in HVD's own code during the decode steps, by phase.",
            labelnames=["phase"],
        )
        self._published: dict[Counter, float] = {}
        no_cycles = dict.fromkeys(DraftSource, 0)
        self.publish(
            num_requests=0,
            num_cycles=no_cycles,
            num_accepted_drafts=no_cycles,
            times=StepClock().totals(),
        )

    def publish(
        self,
        *,
        num_requests: int,
        num_cycles: Mapping[DraftSource, int],
        num_accepted_drafts: Mapping[DraftSource, int],
        times: StepTimes,
    ) -> None:
        """Set the metrics to these totals; takes some 50 microseconds."""
        self._num_requests.set(num_requests)
        for source in DraftSource:
            self._advance(self._num_cycles.labels(source.value), num_cycles[source])
            accepted = self._num_accepted_drafts.labels(source.value)
            self._advance(accepted, num_accepted_drafts[source])
        self._advance(self._num_steps, times.num_steps)
        self._advance(self._step_seconds, times.step)
        for phase, seconds in times.phases.items():
            self._advance(self._host_seconds.labels(phase.value), seconds)

    def _advance(self, counter: Counter, total: float) -> None:
        gained = total - self._published.get(counter, 0)
        if gained > 0:
            counter.inc(gained)
            self._published[counter] = total
