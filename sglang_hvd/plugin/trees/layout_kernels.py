"""The verify tree in two kernel launches. With torch it would take about seventy operations, and a
GPU would wait for each of them between the drafts and their verification.

Each request has a program. Its few nodes stay in registers, and a node is found by comparing it
with all nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from sglang_hvd.plugin.trees.draft_trees import DraftNodes, EagleTrees

# Every node is compared with every other: more nodes than this do not fit into registers.
_MAX_NODES = 128
_MIN_BLOCK = 32


def has_kernels(device: torch.device, width: int) -> bool:
    """Whether the kernels run on this device, and for this verify width."""
    return runs_kernels(device) and width <= _MAX_NODES


def runs_kernels(device: torch.device) -> bool:
    """Triton's kernels run on a GPU, and anywhere in its interpreter."""
    return device.type == "cuda" or triton.knobs.runtime.interpret


def merge(nodes: DraftNodes, trees: EagleTrees, rows: torch.Tensor | None) -> torch.Tensor:
    """layout.merge_eagle_trees by a kernel."""
    n, w = nodes.token_ids.shape
    num_drafting, num_tree_nodes = trees.token_ids.shape
    is_model_node = torch.zeros((n, w), dtype=torch.bool, device=nodes.token_ids.device)
    anything = trees.token_ids  # placeholder for an argument that the kernel does not read
    _merge_kernel[(num_drafting,)](
        nodes.token_ids,
        nodes.parents,
        nodes.num_used,
        is_model_node.view(torch.uint8),
        anything if rows is None else rows,
        trees.token_ids.contiguous(),
        trees.parent_list.contiguous(),
        trees.top_scores_index.contiguous(),
        anything if trees.ranks is None else trees.ranks.contiguous(),
        trees.num_kept,
        nodes.token_ids.stride(0),
        nodes.parents.stride(0),
        nodes.num_used.stride(0),
        w,
        num_tree_nodes,
        trees.parent_list.shape[1],
        trees.topk,
        HAS_ROWS=rows is not None,
        HAS_RANKS=trees.ranks is not None,
        BLOCK=_block(w),
        TREE_BLOCK=_block(num_tree_nodes),
        num_warps=1,
    )
    return is_model_node


def lay_out(
    nodes: DraftNodes, seq_lens: torch.Tensor, mask: torch.Tensor, *, is_full_mask: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, first children and next siblings of the nodes, int64[n, w] each, and their
    visibility in its place in the mask, of bool or uint8."""
    n, w = nodes.token_ids.shape
    positions, next_token, next_sibling = torch.empty(
        (3, n, w), dtype=torch.int64, device=nodes.token_ids.device
    )
    _lay_out_kernel[(n,)](
        nodes.parents,
        nodes.num_used,
        seq_lens,
        positions,
        next_token,
        next_sibling,
        mask.view(torch.uint8),
        nodes.parents.stride(0),
        nodes.num_used.stride(0),
        w,
        IS_FULL_MASK=is_full_mask,
        BLOCK=_block(w),
        num_warps=_layout_warps(w),
    )
    return positions, next_token, next_sibling


def _block(num_nodes: int) -> int:
    """Slots of a program; the same for all small trees, so that few variants are compiled."""
    return max(triton.next_power_of_2(num_nodes), _MIN_BLOCK)


def _layout_warps(width: int) -> int:
    return 4 if width <= _MIN_BLOCK else 8


# Triton must not specialize on these: a server would compile variants while it serves.
@triton.jit(
    do_not_specialize=[
        *("token_stride", "parent_stride", "num_stride"),
        *("w", "num_tree_nodes", "num_groups", "topk"),
    ],
    do_not_specialize_on_alignment=[
        *("token_ids", "parents", "num_used", "is_model_node", "rows", "tree_tokens"),
        *("parent_list", "top_scores_index", "ranks", "num_kept"),
    ],
)
def _merge_kernel(  # type: ignore[no-untyped-def]
    token_ids,
    parents,
    num_used,
    is_model_node,
    rows,
    tree_tokens,
    parent_list,
    top_scores_index,
    ranks,
    num_kept,
    token_stride,
    parent_stride,
    num_stride,
    w,
    num_tree_nodes,
    num_groups,
    topk,
    HAS_ROWS: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE_BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = request
    if HAS_ROWS:
        row = tl.load(rows + request)
    slot = tl.arange(0, BLOCK)
    num = tl.load(num_used + row * num_stride).to(tl.int64)
    is_cached = (slot > 0) & (slot < num)
    tokens = tl.load(token_ids + row * token_stride + slot, mask=slot < w, other=-1)
    links = tl.load(parents + row * parent_stride + slot, mask=slot < w, other=-1)
    cached_tokens, cached_links = tokens, links
    is_drafted = slot < 0

    node = tl.arange(0, TREE_BLOCK)
    first = request * num_tree_nodes
    index = tl.load(top_scores_index + first + node, mask=node < num_tree_nodes, other=-1)
    limit = tl.load(num_kept + request)
    place = tl.zeros([TREE_BLOCK], tl.int64)  # of each node in the row, -1 if it has none
    for k in range(num_tree_nodes):
        group = tl.load(top_scores_index + first + k) // topk
        candidate = tl.load(parent_list + request * num_groups + group, mask=group > 0, other=-2)
        parent = tl.max(tl.where(index == candidate, place, -1), axis=0)
        parent = tl.where(group > 0, parent, 0)
        token = tl.load(tree_tokens + first + k)
        is_kept = parent >= 0
        if HAS_RANKS:
            is_kept = is_kept & (tl.load(ranks + first + k) < limit)
        is_same = is_cached & (cached_links == parent) & (cached_tokens == token)
        found = tl.min(tl.where(is_same, slot, BLOCK), axis=0).to(tl.int64)
        is_new = is_kept & (found == BLOCK)
        at = tl.where(found < BLOCK, found, tl.where(is_kept, num, -1))
        is_here = slot == at
        tokens = tl.where(is_here & is_new, token, tokens)
        links = tl.where(is_here & is_new, parent, links)
        is_drafted = is_drafted | (is_here & is_kept)
        place = tl.where(node == k, at, place)
        num += is_new.to(tl.int64)

    in_row = slot < w
    tl.store(token_ids + row * token_stride + slot, tokens, mask=in_row)
    tl.store(parents + row * parent_stride + slot, links, mask=in_row)
    tl.store(is_model_node + row * w + slot, is_drafted.to(tl.uint8), mask=in_row)
    tl.store(num_used + row * num_stride, num)


@triton.jit(
    do_not_specialize=["parent_stride", "num_stride", "w"],
    do_not_specialize_on_alignment=[
        *("parents", "num_used", "seq_lens", "positions", "next_token", "next_sibling", "mask"),
    ],
)
def _lay_out_kernel(  # type: ignore[no-untyped-def]
    parents,
    num_used,
    seq_lens,
    positions,
    next_token,
    next_sibling,
    mask,
    parent_stride,
    num_stride,
    w,
    IS_FULL_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    num = tl.load(num_used + row * num_stride)
    is_child = (slot > 0) & (slot < num)
    parent = tl.load(parents + row * parent_stride + slot, mask=is_child, other=-1).to(tl.int32)
    this, other = slot[:, None], slot[None, :]
    of_this, of_other = parent[:, None], parent[None, :]

    first_child = tl.min(tl.where(of_this == other, this, BLOCK), axis=0)
    is_sibling = (of_this == of_other) & (of_this >= 0) & (other > this)
    sibling = tl.min(tl.where(is_sibling, other, BLOCK), axis=1)

    # Walks up from all nodes at once, until each is at the root, which every node sees.
    visible = (this == other) | (other == 0)
    at = tl.where(is_child, parent, 0)
    while tl.max(at, axis=0) > 0:
        is_at = other == at[:, None]
        visible = visible | is_at
        at = tl.max(tl.where(is_at, of_other, 0), axis=1)
    depth = tl.sum(visible.to(tl.int32), axis=1) - 1

    seq_len = tl.load(seq_lens + row).to(tl.int64)
    in_row = slot < w
    out = row * w + slot
    tl.store(positions + out, seq_len + depth, mask=in_row)
    tl.store(next_token + out, tl.where(first_child < BLOCK, first_child, -1), mask=in_row)
    tl.store(next_sibling + out, tl.where(sibling < BLOCK, sibling, -1), mask=in_row)

    start, row_len, before = row * w * w, row * 0 + w, row * 0
    if IS_FULL_MASK:
        start, row_len, before = row * 0, seq_len + w, seq_len
        for first in range(0, row, 128):
            request = first + tl.arange(0, 128)
            is_before = request < row
            lens = tl.load(seq_lens + request, mask=is_before, other=0).to(tl.int64)
            start += tl.sum(tl.where(is_before, w * (lens + w), 0), axis=0)
    cells = start + this * row_len + before + other
    tl.store(mask + cells, visible.to(tl.uint8), mask=(this < w) & (other < w))
