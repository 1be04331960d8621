"""Makes one tree of both drafts of a request, and lays trees out as SGLang verifies them.

On a GPU kernels do it (tree_kernels.py). Elsewhere, and for trees of more nodes than those hold,
torch does (tree_torch.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

from sglang_hvd.plugin import tree_kernels
from sglang_hvd.plugin.draft_trees import DraftNodes, EagleTrees, VerifyLayout
from sglang_hvd.plugin.tree_kernels import has_kernels
from sglang_hvd.plugin.tree_torch import (
    lay_out_by_torch,
    mask_buffer,
    merge_eagle_trees_by_torch,
)


def merge_eagle_trees(
    nodes: DraftNodes, trees: EagleTrees, rows: torch.Tensor | None
) -> torch.Tensor:
    """Adds the model drafter's trees of some requests to the cache drafts of a batch: both drafts
    of a request become one trie.

    Args:
        nodes: the cache drafts, written in place; a row that drafts must have room for the kept
            nodes of its tree.
        rows: int64[k]; the requests that the trees are of. None: all, in order.

    Returns:
        bool[n, w]: the slots that the model drafter's trees have.
    """
    if has_kernels(nodes.token_ids.device, nodes.token_ids.shape[1]):
        return tree_kernels.merge(nodes, trees, rows)
    return merge_eagle_trees_by_torch(nodes, trees, rows)


def lay_out(
    nodes: DraftNodes,
    seq_lens: torch.Tensor,
    *,
    mode: TreeMaskMode,
    num_cells: int,
    buffer: torch.Tensor | None,
) -> VerifyLayout:
    """The trees as SGLang reads them: links, positions, and the mask (see pack_mask)."""
    n, w = nodes.parents.shape
    if not has_kernels(nodes.parents.device, w):
        return lay_out_by_torch(nodes, seq_lens, mode=mode, num_cells=num_cells, buffer=buffer)
    mask = mask_buffer(n * w * w, nodes.parents.device, mode, num_cells, buffer)
    is_full = mode == TreeMaskMode.FULL_MASK
    if is_full:
        mask[:num_cells].fill_(1)
    return VerifyLayout(*tree_kernels.lay_out(nodes, seq_lens, mask, is_full_mask=is_full), mask)


def warm_up(
    device: torch.device,
    mode: TreeMaskMode,
    widths: Sequence[int],
    tree_sizes: Sequence[int],
    topk: int,
) -> None:
    """Compiles the kernels that a server needs, before it serves: seconds each when they are new.

    mode: of its masks.
    tree_sizes: nodes of the model drafter's trees before they are cut, root not included.
    """
    for width in widths:
        if not has_kernels(device, width):
            continue
        nodes = _roots(width, device)
        seq_lens = torch.zeros_like(nodes.num_used)
        lay_out(nodes, seq_lens, mode=mode, num_cells=width * width, buffer=None)
        for size, is_cut, has_rows in itertools.product(tree_sizes, (False, True), (False, True)):
            if width == 1 or (not is_cut and size >= width):
                continue  # there is no room for it
            nodes = _roots(width, device)
            index = torch.arange(size, device=device)[None]
            parent_list = torch.zeros((1, 1 + size), dtype=torch.int64, device=device)
            ranks = index if is_cut else None
            num_kept = nodes.num_used.clone()
            trees = EagleTrees(index, parent_list, index, topk, ranks, num_kept)
            merge_eagle_trees(nodes, trees, torch.zeros_like(index[0, :1]) if has_rows else None)


def _roots(width: int, device: torch.device) -> DraftNodes:
    """One request without a draft."""
    nodes = torch.zeros((1, width), dtype=torch.int64, device=device)
    return DraftNodes(nodes, nodes.clone(), torch.ones(1, dtype=torch.int64, device=device))
