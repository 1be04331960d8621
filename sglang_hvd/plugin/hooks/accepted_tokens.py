"""Moves the KV of accepted tokens with our own kernel.

The hook imports its parts when it first runs: every server loads the table of hooks, and one
without HVD must not load SGLang's speculation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def move_to_front(
    move_accept_tokens: Callable[..., None],
    batch: ScheduleBatch,
    accept_index: torch.Tensor,
    num_correct_drafts: torch.Tensor,
    token_to_kv_pool_allocator: Any,
) -> None:
    """AROUND hook: moves the paths of HVD's batches to the front of their slots. SGLang moves those
    of KV pools with an unusual layout.

    Args:
        accept_index: int32[n, depth]; see verify_input.num_accepted_of_model.
        num_correct_drafts: int[n]; accepted draft tokens, the bonus token not counted.
    """
    from sglang_hvd.plugin.trees.accepted_kv import is_moved_by_kernel, move_paths
    from sglang_hvd.plugin.trees.verify_input import HvdVerifyInput

    pool = token_to_kv_pool_allocator.get_kvcache()
    if isinstance(batch.spec_info, HvdVerifyInput) and is_moved_by_kernel(pool):
        move_paths(pool, batch.out_cache_loc, accept_index, num_correct_drafts)
    else:
        move_accept_tokens(batch, accept_index, num_correct_drafts, token_to_kv_pool_allocator)
