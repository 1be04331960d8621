"""Tells the worker what SGLang's scheduler does: it launches steps, becomes idle, pauses, and ends
or aborts requests. Also adds the worker's state to /server_info."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang_hvd.plugin.requests.bad_requests import running
from sglang_hvd.plugin.requests.marks import is_held
from sglang_hvd.plugin.startup.launch import launch_of

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController,
    )

    from sglang_hvd.plugin.engine.worker import HvdWorker


def launch_step(
    run_batch: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, *args: Any, **kw: Any
) -> Any:
    """AROUND hook of Scheduler.run_batch. A step that runs ahead (engine/run_ahead.py) is launched
    without the lengths that SGLang would wait for."""
    worker = worker_of(scheduler)
    if worker is None:
        return run_batch(scheduler, batch, *args, **kw)
    with running(batch.reqs):
        if not scheduler.enable_overlap:
            return run_batch(scheduler, batch, *args, **kw)
        future_map = scheduler.future_map
        if not worker.plan_ahead(batch, gives_lengths=future_map.needs_cpu_seq_lens):
            return run_batch(scheduler, batch, *args, **kw)
        with _without_lengths(future_map):
            return run_batch(scheduler, batch, *args, **kw)


def note_idle(_result: None, scheduler: Scheduler) -> None:
    """AFTER hook of Scheduler.on_idle."""
    worker = worker_of(scheduler)
    if worker is not None:
        worker.on_idle()


def note_pause(_result: None, scheduler: Scheduler, _request: Any) -> None:
    """AFTER hook of Scheduler.pause_generation: SGLang is not idle while it pauses."""
    worker = worker_of(scheduler)
    if worker is not None:
        worker.on_pause()


def note_aborted(_result: None, scheduler: Scheduler, req: Req) -> None:
    """AFTER hook of Scheduler._release_aborted_request, which marks no request as finished."""
    worker = worker_of(scheduler)
    if worker is not None:
        worker.drop(req)


def note_finished(_result: None, processor: SchedulerBatchResultProcessor, req: Req) -> None:
    """AFTER hook of SchedulerBatchResultProcessor._maybe_collect_routed_experts. SGLang calls it on
    every rank for each request that ended, before it sends the answer. The worker already knows of
    those that ended in a decode step."""
    if is_held(req):
        processor.draft_worker.note_finished_at_prefill(req)


def note_shutdown(_result: None, scheduler: Scheduler, _request: Any) -> None:
    """AFTER hook of Scheduler.handle_shutdown: the event loop ends after it."""
    worker = worker_of(scheduler)
    if worker is not None:
        worker.on_shutdown()


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


@contextmanager
def _without_lengths(future_map: FutureMap) -> Iterator[None]:
    """Keeps SGLang from reading the lengths of texts from the device, which would wait for the last
    step."""
    are_needed = future_map.needs_cpu_seq_lens
    future_map.needs_cpu_seq_lens = False
    try:
        yield
    finally:
        future_map.needs_cpu_seq_lens = are_needed
