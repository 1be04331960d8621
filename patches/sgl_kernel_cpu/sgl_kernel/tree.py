"""Verify trees: build one from an EAGLE draft, read one back from its mask, walk one greedily.

A tree of W nodes per request; node 0 is the last committed token. `retrieve_next_token[b, i]` is
the first child of node i, `retrieve_next_sibling[b, i]` the next child of i's parent, -1 where
there is none. (The keyword arguments that SGLang passes by name are spelled "retrive" there.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_kernel.demands import demand, demand_verified

_FULL_MASK, _QLEN_ONLY = 0, 1  # sglang.kernels.ops.speculative.spec_tree.TreeMaskMode


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Build the tree of the draft candidates that were kept; W = draft_token_num.

    parent_list: int64[B, 1 + (depth - 1) * topk], the candidate each group of topk candidates hangs
    from. selected_index: int64[B, W - 1], the kept candidates, ascending. verified_seq_len: int[B].
    Written: tree_mask (flat bool, its prefix columns are the caller's), positions int64[B * W],
    and the links int64[B, W], which come in as -1. Raises ValueError for what the CUDA kernel does
    not take.
    """
    width = draft_token_num
    batch = verified_seq_len.numel()
    num_parents = parent_list.shape[1] if depth == 1 else topk * (depth - 1) + 1
    demand(torch.int64, (batch, num_parents), parent_list=parent_list)
    demand(torch.int64, (batch, width - 1), selected_index=selected_index)
    demand(torch.int64, (batch,), verified_seq_len=verified_seq_len)
    demand(torch.int64, (batch * width,), positions=positions)
    demand(
        torch.int64,
        (batch, width),
        retrieve_index=retrieve_index,
        retrieve_next_token=retrieve_next_token,
        retrieve_next_sibling=retrieve_next_sibling,
    )
    seq_lens = verified_seq_len.long()

    # A group of candidates hangs from node 0 (group 0) or from one earlier candidate.
    group = selected_index // topk
    parent_candidate = parent_list.gather(1, group) if parent_list.shape[1] else group
    is_parent = parent_candidate[:, :, None] == selected_index[:, None, :]
    parent = torch.where(is_parent.any(2), is_parent.int().argmax(2) + 1, -1)
    parent = torch.where(group == 0, 0, parent)

    retrieve_index.copy_(torch.arange(batch * width).view(batch, width))
    parent = torch.cat([torch.full((batch, 1), -1), parent], dim=1)
    _link(parent, retrieve_next_token, retrieve_next_sibling)

    # Walk all nodes towards node 0 at once; the column of node 0 is always visible.
    ancestors = torch.zeros(batch, width, width, dtype=torch.bool)
    ancestors[:, :, 0] = True
    node = torch.arange(width).expand(batch, width)
    num_ancestors = torch.zeros(batch, width, dtype=torch.long)
    for _ in range(depth):
        below_root = node > 0
        num_ancestors += below_root
        ancestors.scatter_(2, node.clamp_min(0)[:, :, None], True)
        node = torch.where(below_root, parent.gather(1, node.clamp_min(0)), node)
    positions.copy_((seq_lens[:, None] + num_ancestors).flatten())

    if tree_mask_mode == _QLEN_ONLY:
        tree_mask[: ancestors.numel()] = ancestors.flatten()
    elif tree_mask_mode == _FULL_MASK:
        row_len = (seq_lens + width)[:, None, None]
        first = (seq_lens.cumsum(0) - seq_lens) * width + torch.arange(batch) * width * width
        cells = torch.arange(width)
        columns = seq_lens[:, None, None] + cells
        tree_mask[first[:, None, None] + cells[:, None] * row_len + columns] = ancestors
    else:
        raise NotImplementedError(
            f"sgl_kernel (CPU): tree_mask_mode must be FULL_MASK or QLEN_ONLY, got {tree_mask_mode}"
        )


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of the tree whose mask (flat bool[B * W * W]) is given; all written."""
    shape = (batch_size, draft_token_num)
    ancestors = tree_mask.view(*shape, draft_token_num).bool().tril(-1)
    parent = torch.where(ancestors, torch.arange(draft_token_num), -1).amax(2)
    positions.view(shape).copy_(ancestors.sum(2) + verified_seq_len[:, None])
    retrieve_index.view(shape).copy_(torch.arange(batch_size * draft_token_num).view(shape))
    _link(parent, retrieve_next_token.view(shape), retrieve_next_sibling.view(shape))


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the target model's argmax down each tree as far as the tree has it.

    candidates, target_predict: int64[B, W]. Written: predicts int32[B * W] at the accepted nodes,
    accept_index int32[B, max_depth] (nodes on the path), accept_token_num int32[B] (drafts
    accepted, bonus not counted). Raises ValueError for what the CUDA kernel does not take.
    """
    demand_verified(
        predicts,
        accept_index,
        accept_token_num,
        *(candidates, retrive_index, retrive_next_token, retrive_next_sibling),
    )
    demand(torch.int64, candidates.shape, target_predict=target_predict)
    max_depth = accept_index.shape[1]
    target = target_predict.flatten().tolist()
    rows = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        strict=True,
    )
    paths = []
    for tokens, index, next_token, next_sibling in rows:
        path, node = [index[0]], 0
        while len(path) < max_depth:
            wanted = target[path[-1]]
            node = next_token[node]
            while node != -1 and tokens[node] != wanted:
                node = next_sibling[node]
            if node == -1:
                break
            path.append(index[node])
        paths.append(path)
    write_paths(
        paths,
        [target[node] for path in paths for node in path],
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accept_token_num,
    )


def write_paths(
    paths: Sequence[Sequence[int]],
    tokens: Sequence[int],
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
) -> None:
    """Write what verification found; the three tensors are those of `verify_tree_greedy_cpu`.

    paths[b]: the accepted nodes of request b, node 0 first. tokens: what follows each of those
    nodes, the bonus token after the last one, all requests in a row.
    """
    lens = torch.tensor([len(path) for path in paths])
    nodes = torch.tensor([node for path in paths for node in path])
    accept_index[torch.arange(accept_index.shape[1]) < lens[:, None]] = nodes.to(accept_index.dtype)
    accept_token_num.copy_(lens - 1)
    predicts[nodes] = torch.tensor(tokens, dtype=predicts.dtype)


def rotate_input_ids_cpu(*args: object) -> None:
    """Imported by SGLang, used by multi-layer EAGLE only."""
    raise NotImplementedError(
        "sgl_kernel (CPU): multi-layer EAGLE is not supported without a GPU: "
        "serve without --enable-multi-layer-eagle"
    )


def _link(parent: Tensor, next_token: Tensor, next_sibling: Tensor) -> None:
    """Write first-child and next-sibling links for parent: int64[B, W], -1 for no parent."""
    node = torch.arange(parent.shape[1])
    is_child = parent[:, None, :] == node[:, None]  # [B, parent, child]
    next_token.copy_(_first(is_child))
    has_same_parent = (parent[:, :, None] == parent[:, None, :]) & (parent >= 0)[:, :, None]
    next_sibling.copy_(_first(has_same_parent & (node > node[:, None])))


def _first(is_set: Tensor) -> Tensor:
    """is_set: bool[B, W, W]. Index of the first set cell of each row, or -1."""
    return torch.where(is_set.any(2), is_set.int().argmax(2), -1)
