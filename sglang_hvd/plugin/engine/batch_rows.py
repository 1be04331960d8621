"""Some requests of a batch as a batch of their own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def rows_of(batch: ScheduleBatch, rows: list[int], on_device: torch.Tensor) -> ScheduleBatch:
    """These rows of a batch, as far as the model drafter's forwards look at it.

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
    # Under overlap scheduling it would filter only these, which the scheduler has used by now.
    some.spec_info.future_indices = None
    some.spec_info.filter_batch(on_device)
    return some
