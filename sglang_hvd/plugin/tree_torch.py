"""The verify tree by torch: both drafts of a request in one tree, and the tensors of all of them.

All functions work on whole batches on the target's device and never wait for it. Shapes:
`n` requests, `w` the verify width (nodes per request, root included).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

from sglang_hvd.plugin.draft_trees import DraftNodes, EagleTrees, VerifyLayout


@dataclass(frozen=True, slots=True)
class ModelTrees:
    """The model drafter's trees of a batch, in topological order, root not included.

    Attributes:
        token_ids: int64[n, m].
        parents: int64[n, m]; 0 is the root, j the j-th of these nodes, -1 none that is there.
        is_kept: bool[n, m]; the nodes to verify, as far as those above them are verified too.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    is_kept: torch.Tensor


@dataclass(frozen=True, slots=True)
class VerifyTree:
    """What SGLang's tree verification reads.

    Attributes:
        depth: int64[n, w]; distance to the root, 1 in unused slots.
        next_token: int64[n, w]; first child of a node, -1 where it has none.
        next_sibling: int64[n, w]; next child of the same parent, -1 where there is none.
        visible: bool[n, w, w]; node i attends to node j: itself and its ancestors.
    """

    depth: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor
    visible: torch.Tensor


def merge_eagle_trees_by_torch(
    nodes: DraftNodes, trees: EagleTrees, rows: torch.Tensor | None
) -> torch.Tensor:
    """tree_layout.merge_eagle_trees without kernels."""
    parents = parents_of_eagle_tree(trees.parent_list, trees.top_scores_index, trees.topk)
    is_kept = torch.ones_like(parents, dtype=torch.bool)
    if trees.ranks is not None:
        is_kept = trees.ranks < trees.num_kept[:, None]
    if rows is None:
        rows = torch.arange(len(nodes.num_used), device=nodes.num_used.device)
    merged, of_rows = merge_trees(
        DraftNodes(nodes.token_ids[rows], nodes.parents[rows], nodes.num_used[rows]),
        ModelTrees(trees.token_ids, parents, is_kept),
    )
    nodes.token_ids.index_copy_(0, rows, merged.token_ids)
    nodes.parents.index_copy_(0, rows, merged.parents)
    nodes.num_used.index_copy_(0, rows, merged.num_used)
    is_model_node = torch.zeros_like(nodes.token_ids, dtype=torch.bool)
    return is_model_node.index_copy(0, rows, of_rows)


def lay_out_by_torch(
    nodes: DraftNodes,
    seq_lens: torch.Tensor,
    *,
    mode: TreeMaskMode,
    num_cells: int,
    buffer: torch.Tensor | None,
) -> VerifyLayout:
    """tree_layout.lay_out without kernels."""
    tree = link_nodes(nodes)
    mask = pack_mask(tree.visible, seq_lens, mode=mode, num_cells=num_cells, buffer=buffer)
    positions = seq_lens[:, None] + tree.depth
    return VerifyLayout(positions, tree.next_token, tree.next_sibling, mask)


def merge_trees(cache: DraftNodes, model: ModelTrees) -> tuple[DraftNodes, torch.Tensor]:
    """Both drafts of each request as one trie: equal prefixes are shared.

    Args:
        cache: the cache drafts; a bare root where there is none. A row must have room for its draft
            and the kept nodes of its model tree.
        model: may be of any width.

    Returns:
        The trees, and bool[n, w]: the slots that the model drafter's tree has.
    """
    n, w = cache.token_ids.shape
    device = cache.token_ids.device
    found = _find(cache, model)
    is_shared = found >= 0

    is_kept = model.is_kept & _has_path(model.parents, model.is_kept | is_shared)
    is_new = is_kept & ~is_shared
    place = cache.num_used[:, None] + torch.cumsum(is_new, dim=1) - 1
    place = torch.where(is_shared, found, place)
    # What is neither kept nor shared goes to a slot behind the row, which is cut off.
    place = torch.where(is_new | is_shared, place, w)
    places = torch.cat([torch.zeros((n, 1), dtype=place.dtype, device=device), place], dim=1)
    target = torch.where(is_new, place, w)
    tokens = torch.cat([cache.token_ids, cache.token_ids[:, :1]], dim=1)
    parents = torch.cat([cache.parents, cache.parents[:, :1]], dim=1)
    tokens = tokens.scatter(1, target, model.token_ids)
    parents = parents.scatter(1, target, places.gather(1, model.parents.clamp(min=0)))
    is_model_node = torch.zeros((n, w + 1), dtype=torch.bool, device=device)
    is_model_node = is_model_node.scatter(1, torch.where(is_kept, place, w), True)
    merged = DraftNodes(tokens[:, :w], parents[:, :w], cache.num_used + is_new.sum(dim=1))
    return merged, is_model_node[:, :w]


def _find(cache: DraftNodes, model: ModelTrees) -> torch.Tensor:
    """Where each model node's text stands in its cache draft: int64[n, m], -1 where it does not."""
    n, w = cache.token_ids.shape
    m = model.token_ids.shape[1]
    device = cache.token_ids.device
    tokens = torch.cat([cache.token_ids[:, :1], model.token_ids], dim=1)
    is_used = torch.arange(w, device=device) < cache.num_used[:, None]
    same = (tokens[:, :, None] == cache.token_ids[:, None, :]) & is_used[:, None, :]
    # The roots are the same and nothing else is a root.
    same[:, 0, :] = False
    same[:, :, 0] = False
    same[:, 0, 0] = True
    same[:, 1:] &= (model.parents >= 0)[:, :, None]
    # Two nodes stand for the same text if their predecessors do: 1, 2, 4, ... of them at a time,
    # and a root precedes itself.
    model_up = _with_root(model.parents).clamp(min=0)
    cache_up = cache.parents.clamp(min=0)
    for _ in range(m.bit_length()):
        pairs = (model_up[:, :, None] * w + cache_up[:, None, :]).reshape(n, -1)
        same &= same.reshape(n, -1).gather(1, pairs).view_as(same)
        model_up, cache_up = model_up.gather(1, model_up), cache_up.gather(1, cache_up)
    of_nodes = same[:, 1:]
    return torch.where(of_nodes.any(dim=2), of_nodes.int().argmax(dim=2), -1)


def link_nodes(nodes: DraftNodes) -> VerifyTree:
    """Derive links, depths and visibility from the parents.

    An unused slot has no links, sees the root and itself (FA3 sums mask rows, so no row may be
    empty), and lies at depth 1; nothing links to it, so it is never accepted.
    """
    w = nodes.parents.shape[1]
    slot = torch.arange(w, device=nodes.parents.device)
    is_used = slot < nodes.num_used[:, None]
    is_child = is_used & (slot > 0)
    # child_of[b, i, j]: node i is a child of node j
    child_of = (nodes.parents[:, :, None] == slot) & is_child[:, :, None]
    links = child_of | (slot[:, None] == slot)
    visible = _reach(links)
    visible[:, :, 0] = True

    none = torch.full((), w, device=slot.device)
    # The first child is the smallest index among a node's children.
    first_child = torch.where(child_of, slot[:, None], none).amin(dim=1)
    # The next sibling is the smallest larger index with the same parent.
    same_parent = (
        (nodes.parents[:, :, None] == nodes.parents[:, None, :])
        & is_child[:, :, None]
        & is_child[:, None, :]
        & (slot > slot[:, None])
    )
    next_sibling = torch.where(same_parent, slot, none).amin(dim=2)
    return VerifyTree(
        depth=visible.sum(dim=2) - 1,
        next_token=torch.where(first_child == w, -1, first_child),
        next_sibling=torch.where(next_sibling == w, -1, next_sibling),
        visible=visible,
    )


def parents_of_eagle_tree(
    parent_list: torch.Tensor, top_scores_index: torch.Tensor, topk: int
) -> torch.Tensor:
    """Parents of the nodes that EAGLE's draft loop selected.

    Args:
        parent_list: int64[n, 1 + (num_steps - 1) * topk], or of width 0 for one step; the
            candidate index of the parent of each group of topk candidates.
        top_scores_index: int64[n, m]; candidate index of each selected node, ascending.
        topk: candidates per expanded node.

    Returns:
        int64[n, m]; index of the parent among the nodes, where 0 is the root and selected node
        k is node k + 1; -1 for a node whose parent was not selected, as may be where their scores
        are equal. The layout is that of SGLang's build_tree_efficient kernel.
    """
    group = top_scores_index // topk
    if parent_list.shape[1] == 0:
        return torch.zeros_like(top_scores_index)
    parent_candidate = parent_list.gather(1, group)
    is_parent = top_scores_index[:, None, :] == parent_candidate[:, :, None]
    position = is_parent.int().argmax(dim=2)
    of_node = torch.where(is_parent.any(dim=2), position + 1, -1)
    return torch.where(group > 0, of_node, 0)


def _has_path(parents: torch.Tensor, has_place: torch.Tensor) -> torch.Tensor:
    """Whether each node has a place, and all above it up to the root: bool[n, m]."""
    up = _with_root(parents)
    is_whole = (up >= 0) & torch.cat([torch.ones_like(has_place[:, :1]), has_place], dim=1)
    up = up.clamp(min=0)
    for _ in range(parents.shape[1].bit_length()):
        is_whole = is_whole & is_whole.gather(1, up)
        up = up.gather(1, up)
    return is_whole[:, 1:]


def _with_root(parents: torch.Tensor) -> torch.Tensor:
    """int64[n, 1 + m]: the root, which precedes itself, before the nodes."""
    return torch.cat([torch.zeros_like(parents[:, :1]), parents], dim=1)


def pack_mask(
    visible: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    mode: TreeMaskMode,
    num_cells: int,
    buffer: torch.Tensor | None,
) -> torch.Tensor:
    """Lay the visibility out as the attention backend reads it.

    Args:
        visible: bool[n, w, w].
        seq_lens: int64[n]; committed tokens in the KV cache.
        mode: QLEN_ONLY takes the w x w cells of each request; FULL_MASK takes, packed request
            after request, w rows of seq_len + w cells, all true over the committed prefix.
        num_cells: cells of a FULL_MASK to set before the trees are written; at least those that
            this batch needs.
        buffer: bool or uint8, written in place where the backend owns one.
    """
    if mode == TreeMaskMode.QLEN_ONLY and buffer is None:
        return visible.reshape(-1)
    buffer = mask_buffer(visible.numel(), visible.device, mode, num_cells, buffer)
    if mode == TreeMaskMode.QLEN_ONLY:
        buffer[: visible.numel()].copy_(visible.reshape(-1))
        return buffer
    # Only what this batch uses: the buffer itself spans the longest context of every request.
    buffer[:num_cells].fill_(1)
    w = visible.shape[1]
    row_len = seq_lens + w
    start = torch.cumsum(w * row_len, dim=0) - w * row_len
    slot = torch.arange(w, device=visible.device)
    cells = start[:, None, None] + slot[:, None] * row_len[:, None, None] + slot
    cells += seq_lens[:, None, None]
    buffer.scatter_(0, cells.reshape(-1), visible.reshape(-1).to(buffer.dtype))
    return buffer


def mask_buffer(
    num_tree_cells: int,
    device: torch.device,
    mode: TreeMaskMode,
    num_cells: int,
    buffer: torch.Tensor | None,
) -> torch.Tensor:
    """The buffer, or one of the size that pack_mask's mode takes where the backend owns none."""
    if mode not in (TreeMaskMode.QLEN_ONLY, TreeMaskMode.FULL_MASK):
        raise NotImplementedError(f"tree mask {mode.name}: HVD writes QLEN_ONLY and FULL_MASK")
    if buffer is not None:
        return buffer
    size = num_tree_cells if mode == TreeMaskMode.QLEN_ONLY else num_cells
    return torch.empty(size, dtype=torch.bool, device=device)


def _reach(links: torch.Tensor) -> torch.Tensor:
    """Transitive closure of bool[n, w, w] by squaring: log2(w) products for any depth."""
    reach = links.float()
    for _ in range((links.shape[1] - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0.5
