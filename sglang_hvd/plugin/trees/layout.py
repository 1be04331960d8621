"""Merges the drafts of a request into one tree, and lays trees out as SGLang verifies them.

On a GPU kernels do this (layout_kernels.py). Elsewhere, and for trees with more nodes than the
kernels hold, the native core does it (host_layout.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

from sglang_hvd.plugin.trees import host_layout, layout_kernels
from sglang_hvd.plugin.trees.draft_trees import DraftNodes, EagleTrees, VerifyLayout
from sglang_hvd.plugin.trees.layout_kernels import has_kernels


def merge_eagle_trees(
    nodes: DraftNodes, trees: EagleTrees, rows: torch.Tensor | None
) -> torch.Tensor:
    """Adds the trees of a drafter for some requests to the other drafts of a batch: all drafts of a
    request become one trie. Each further drafter takes another call.

    Args:
        nodes: the drafts so far, written in place; each row of the trees must have room for the
            kept nodes of its tree.
        rows: int64[k]; the requests of the trees. None: all, in order.

    Returns:
        bool[n, w]: the slots that the drafter's trees have.
    """
    device, width = nodes.token_ids.device, nodes.token_ids.shape[1]
    by = layout_kernels if has_kernels(device, width) else host_layout
    return by.merge(nodes, trees, rows)


def lay_out(
    nodes: DraftNodes,
    seq_lens: torch.Tensor,
    *,
    mode: TreeMaskMode,
    num_cells: int,
    buffer: torch.Tensor | None,
) -> VerifyLayout:
    """The trees in the form that SGLang reads: links, positions, and the mask.

    Args:
        seq_lens: int64[n]; committed tokens in the KV cache.
        mode: mode of the mask; see VerifyLayout.
        num_cells: cells of a FULL_MASK to set before the trees are written; at least those that
            this batch needs.
        buffer: bool or uint8, written in place; None if the backend owns none.
    """
    n, w = nodes.parents.shape
    device = nodes.parents.device
    is_full = mode == TreeMaskMode.FULL_MASK
    if not is_full and mode != TreeMaskMode.QLEN_ONLY:
        raise NotImplementedError(f"tree mask {mode.name}: HVD writes QLEN_ONLY and FULL_MASK")
    mask = buffer
    if mask is None:
        mask = torch.empty(num_cells if is_full else n * w * w, dtype=torch.bool, device=device)
    cells = mask
    if is_full:
        # Only this batch's cells: the buffer has room for the longest context of every request.
        cells = mask[:num_cells].fill_(1)
    by = layout_kernels if has_kernels(device, w) else host_layout
    positions, next_token, next_sibling = by.lay_out(nodes, seq_lens, cells, is_full_mask=is_full)
    return VerifyLayout(positions, next_token, next_sibling, mask)


def warm_up(
    device: torch.device,
    mode: TreeMaskMode,
    widths: Sequence[int],
    tree_sizes: Sequence[int],
    topk: int,
) -> None:
    """Compiles the kernels that a server needs, before it serves. A new kernel takes seconds.

    mode: mode of the server's masks.
    tree_sizes: nodes of the model drafter's trees before they are cut, root not included.
    """
    root = torch.zeros(1, dtype=torch.int64, device=device)
    for width in widths:
        if not has_kernels(device, width):
            continue
        nodes = DraftNodes.of_roots(root, width)
        seq_lens = torch.zeros_like(nodes.num_used)
        lay_out(nodes, seq_lens, mode=mode, num_cells=width * width, buffer=None)
        for size, is_cut, has_rows in itertools.product(tree_sizes, (False, True), (False, True)):
            if width == 1 or (not is_cut and size >= width):
                continue  # there is no room for it
            nodes = DraftNodes.of_roots(root, width)
            index = torch.arange(size, device=device)[None]
            parent_list = torch.zeros((1, 1 + size), dtype=torch.int64, device=device)
            ranks = index if is_cut else None
            num_kept = nodes.num_used.clone()
            trees = EagleTrees(index, parent_list, index, topk, ranks, num_kept)
            merge_eagle_trees(nodes, trees, torch.zeros_like(index[0, :1]) if has_rows else None)
