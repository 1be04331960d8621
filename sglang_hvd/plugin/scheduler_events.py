"""What the scheduler does without a decode step, and the worker has to know of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_hvd.plugin.launch import launch_of
from sglang_hvd.plugin.request_marks import is_held

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )

    from sglang_hvd.plugin.worker import HvdWorker


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


def worker_of(scheduler: Scheduler) -> HvdWorker | None:
    """None without HVD; then nothing of the worker, and what it imports, is imported either."""
    if launch_of(scheduler.server_args) is None:
        return None
    from sglang_hvd.plugin.worker import HvdWorker

    worker = scheduler.draft_worker
    return worker if isinstance(worker, HvdWorker) else None
