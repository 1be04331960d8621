"""What every forward of the draft model needs: SGLang's contexts, and some requests of a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sglang.srt.layers.moe.utils import (
    speculative_moe_a2a_backend_context,
    speculative_moe_backend_context,
)
from sglang.srt.speculative.spec_utils import draft_tp_context

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker


@contextmanager
def drafting(draft_worker: EagleDraftWorker) -> Iterator[None]:
    """What SGLang sets up around everything that runs the draft model."""
    with (
        draft_tp_context(draft_worker.parallel_layout),
        speculative_moe_backend_context(),
        speculative_moe_a2a_backend_context(),
    ):
        yield


def rows_of(batch: ScheduleBatch, rows: list[int], on_device: torch.Tensor) -> ScheduleBatch:
    """These rows of a batch as a batch of their own, as far as forwards of the draft model read it.

    on_device: int64[len(rows)]; the rows, on the batch's device.
    """
    some = copy.copy(batch)
    some.reqs = [batch.reqs[row] for row in rows]
    some.multimodal_inputs = [batch.multimodal_inputs[row] for row in rows]
    some.seq_lens = batch.seq_lens[on_device]
    some.orig_seq_lens = batch.orig_seq_lens[on_device]
    some.req_pool_indices = batch.req_pool_indices[on_device]
    if batch.req_pool_indices_cpu is not None:
        some.req_pool_indices_cpu = batch.req_pool_indices_cpu[rows]
    some.seq_lens_sum = None
    if batch.seq_lens_cpu is not None:
        some.seq_lens_cpu = batch.seq_lens_cpu[rows]
        some.seq_lens_sum = int(some.seq_lens_cpu.sum())
    some.spec_info = copy.copy(batch.spec_info)
    # Under overlap scheduling filter_batch would cut only these, which the scheduler has used.
    some.spec_info.future_indices = None
    some.spec_info.filter_batch(on_device)
    return some
