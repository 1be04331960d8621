"""Tells the worker about events outside of decode steps, and /server_info about the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_hvd.plugin.requests.marks import is_held
from sglang_hvd.plugin.startup.launch import launch_of

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController,
    )

    from sglang_hvd.plugin.engine.worker import HvdWorker


def let_go_when_idle(_result: None, scheduler: Scheduler) -> None:
    """AFTER hook of Scheduler.on_idle."""
    worker = worker_of(scheduler)
    if worker is not None:
        worker.on_idle()


def end_step_at_pause(_result: None, scheduler: Scheduler, _request: Any) -> None:
    """AFTER hook of Scheduler.pause_generation: SGLang is not idle while it pauses."""
    worker = worker_of(scheduler)
    if worker is not None:
        worker.on_pause()


def let_go_of_aborted(_result: None, scheduler: Scheduler, req: Req) -> None:
    """AFTER hook of Scheduler._release_aborted_request: it marks no request as finished."""
    worker = worker_of(scheduler)
    if worker is not None:
        worker.let_go(req)


def note_finished(_result: None, processor: SchedulerBatchResultProcessor, req: Req) -> None:
    """AFTER hook of SchedulerBatchResultProcessor._maybe_collect_routed_experts. SGLang calls it on
    every rank for each request that ended, before the answer is sent; of those that ended in a
    decode step the worker was told before."""
    if is_held(req):
        processor.draft_worker.note_finished_at_prefill(req)


def add_hvd_state(
    output: GetInternalStateReqOutput, controller: SchedulerInternalStateController, _request: Any
) -> None:
    """AFTER hook of get_internal_state: `/server_info` -> internal_states[rank]["hvd"]."""
    worker = worker_of(controller.scheduler)
    if worker is not None:
        output.internal_state["hvd"] = worker.describe()


def worker_of(scheduler: Scheduler) -> HvdWorker | None:
    """The scheduler's HVD worker; None on a server without HVD.

    The worker's module is imported for its type only: importing it would load SGLang's speculation
    on every server.
    """
    return None if launch_of(scheduler.server_args) is None else scheduler.draft_worker
