"""Plain steps that are launched before the tokens of the step before are known.

A step with drafts waits for the tokens of the last, and while the host reads and plans, the GPU has
nothing to do. Where no draft pays, that is all that distinguishes a step from plain serving, which
under overlap scheduling launches a step while the last one runs. So does this worker where the last
step had no drafts: each of its requests then has one token more, and where those before it do not
ask for drafts (HeldRequests.runs_ahead), this step has none either, whatever that token is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang_hvd.plugin.hooks.scheduler_events import worker_of

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler


def launch_step(
    run_batch: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, *args: Any, **kw: Any
) -> Any:
    """AROUND hook of Scheduler.run_batch."""
    worker = worker_of(scheduler)
    if worker is None or not scheduler.enable_overlap or not worker.runs_ahead(batch):
        return run_batch(scheduler, batch, *args, **kw)
    with _without_lengths(scheduler.future_map) as are_needed:
        worker.gives_lengths = are_needed
        return run_batch(scheduler, batch, *args, **kw)


@contextmanager
def _without_lengths(future_map: FutureMap) -> Iterator[bool]:
    """SGLang does not read the lengths of texts from the device meanwhile, for which it would wait
    for the last step. Yields whether it does otherwise."""
    are_needed: bool = future_map.needs_cpu_seq_lens
    future_map.needs_cpu_seq_lens = False
    try:
        yield are_needed
    finally:
        future_map.needs_cpu_seq_lens = are_needed
