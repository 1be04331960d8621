"""Puts HVD's own parts into SGLang's verification: the sampling at nodes, the account of penalties,
and the kernel that moves the KV of accepted tokens.

The hooks import their parts when they first run: every server loads the table of hooks, and one
without HVD must not load SGLang's speculation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_hvd.plugin.startup.launch import served_launch

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def sample_nodes(
    eagle_sample: Callable[..., Any],
    verify_input: Any,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    grammar_mask: Any = None,
    **kw: Any,
) -> Any:
    """AROUND hook of eagle_sample: HVD's verifications bring their own sampler."""
    sample = getattr(verify_input, "sample", None)
    if sample is None:
        return eagle_sample(verify_input, batch, logits_output, grammar_mask, **kw)
    return sample(verify_input, logits_output, grammar_mask)


def leave_penalties_out(prepare_if_required: Callable[[Any], bool], penalizer: Any) -> bool:
    """AROUND hook of _BatchedPenalizer.prepare_if_required. SGLang's penalties know one token of
    each step, and take an array of the whole batch. HVD works them out for each verification."""
    if served_launch() is not None:
        return False
    return prepare_if_required(penalizer)


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
