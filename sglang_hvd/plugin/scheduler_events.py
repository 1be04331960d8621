"""What the scheduler does without a step, and the worker has to know of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_hvd.plugin.launch import launch_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

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


def worker_of(scheduler: Scheduler) -> HvdWorker | None:
    """None without HVD; then nothing of the worker, and what it imports, is imported either."""
    if launch_of(scheduler.server_args) is None:
        return None
    from sglang_hvd.plugin.worker import HvdWorker

    worker = scheduler.draft_worker
    return worker if isinstance(worker, HvdWorker) else None
