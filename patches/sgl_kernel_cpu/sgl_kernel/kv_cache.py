"""Where the tokens of a request live in the KV cache: slot lookup, slot assignment and KV copies.

Throughout, `req_to_token` is int32[num_rows, pool_len]: row r, column p holds the KV slot of
position p of the request in row r, and `req_pool_indices` is int[num_requests]: their rows.
"""

import ctypes

import torch
from torch import Tensor


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write the slots of positions [start, end) of each request, one request after the other.

    start_offset, end_offset: int[num_requests]. out_cache_loc: int64[>= sum(end - start)], written.
    """
    rows, columns = _ragged_cells(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The reverse of `assign_extend_cache_locs_cpu`: store the slots of positions [start, end)."""
    rows, columns = _ragged_cells(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Write the topk * num_steps slots that follow each request's seq_lens committed tokens.

    out_cache_loc: int64[num_requests * topk * num_steps], written.
    """
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc.copy_(slots.flatten())


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """A req_to_token with one row per draft branch: the request's prefix, then the branch's slots.

    Branch t of a request writes to positions [seq_len + t * num_steps, ... + num_steps) of the
    request's row (the layout of `assign_draft_cache_locs_contiguous_cpu`).

    Returns int32[num_requests * topk, max(seq_lens) + num_steps]; row r * topk + t is defined up to
    column seq_lens[r] + num_steps.
    """
    seq_lens = seq_lens.long()
    width = int(seq_lens.max()) + num_steps
    rows = req_to_token[req_pool_indices.long()]
    branches = rows[:, :width].repeat_interleave(topk, dim=0)
    steps = torch.arange(num_steps)
    ends = seq_lens.repeat_interleave(topk)[:, None] + steps
    starts = seq_lens[:, None, None] + torch.arange(topk)[:, None] * num_steps + steps
    slots = rows.gather(1, starts.flatten(1)).view(-1, num_steps)
    return branches.scatter_(1, ends, slots)


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Write the last accepted token of each request.

    accept_tokens: int[num_requests * accept_stride]. accept_lens: int[num_requests], bonus token
    included. bonus_tokens: int[num_requests], written.
    """
    lens = accept_lens.long()
    last = torch.arange(lens.numel()) * accept_stride + lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Pack the slots of the accepted nodes to the front of accept_out_cache_loc.

    accept_index: int[any shape], -1 where nothing was accepted.
    """
    accepted = accept_index.flatten()
    slots = out_cache_loc[accepted[accepted >= 0].long()]
    accept_out_cache_loc[: slots.numel()] = slots.to(accept_out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copy slots src_loc to slots tgt_loc in every buffer; all sources are read before any write.

    data_ptrs: uint64[num_buffers], addresses of contiguous buffers of slots. strides: int64 of the
    same shape, bytes per slot. tgt_loc, src_loc: int64[num_slots].
    """
    if tgt_loc.numel() == 0:
        return
    src, tgt = src_loc.long(), tgt_loc.long()
    num_slots = int(torch.maximum(src.max(), tgt.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (num_slots * stride)).from_address(address)
        slots = torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, stride)
        slots.index_copy_(0, tgt, slots.index_select(0, src))


def _ragged_cells(
    req_pool_indices: Tensor, start_offset: Tensor, end_offset: Tensor
) -> tuple[Tensor, Tensor]:
    """Row and column of every position [start, end) of every request, in order."""
    start = start_offset.long()
    lengths = end_offset.long() - start
    rows = req_pool_indices.long().repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    columns = torch.arange(rows.numel()) + (start - first).repeat_interleave(lengths)
    return rows, columns
