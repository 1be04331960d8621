"""The verify tree on the host: for a CPU, and for trees with more nodes than the kernels hold.

native/verify_tree.hpp walks the nodes of each request. Tensors on a device are copied to the host
and back, so the host waits for them.
"""

from __future__ import annotations

import torch

from sglang_hvd._native import lay_out as _lay_out
from sglang_hvd._native import lay_out_drafts as _lay_out_drafts
from sglang_hvd._native import merge as _merge
from sglang_hvd.plugin.trees.draft_trees import DraftNodes, EagleTrees, HostLayout, VerifyLayout
from sglang_hvd.types import HostDrafts


def lay_out_drafts(
    drafts: HostDrafts,
    roots: torch.Tensor,
    seq_lens: torch.Tensor,
    width: int,
    mask: torch.Tensor,
    *,
    is_full_mask: bool,
    trees: EagleTrees | None,
    rows: torch.Tensor | None,
) -> HostLayout:
    """All drafts of a step as verify trees, in one native call. All tensors are on the host.

    Args:
        roots: int64[n]; the last committed tokens.
        seq_lens: int64[n]; committed tokens in the KV cache.
        mask: bool or uint8, written in place; all cells of a full mask are set first.
        trees, rows: as in layout.merge_eagle_trees; trees is None if no drafter ran.
    """
    n = len(drafts)
    planes = torch.empty((6, n, width), dtype=torch.int64)
    num_used = torch.empty(n, dtype=torch.int64)
    is_model_node = None if trees is None else torch.zeros((n, width), dtype=torch.bool)
    _lay_out_drafts(
        drafts.token_ids,
        drafts.parents,
        drafts.num_nodes,
        roots.numpy(),
        seq_lens.numpy(),
        None if rows is None else rows.numpy(),
        None if trees is None else trees.token_ids.contiguous().numpy(),
        None if trees is None else trees.parent_list.contiguous().numpy(),
        None if trees is None else trees.top_scores_index.contiguous().numpy(),
        1 if trees is None else trees.topk,
        None if trees is None or trees.ranks is None else trees.ranks.contiguous().numpy(),
        None if trees is None else trees.num_kept.numpy(),
        None if is_model_node is None else is_model_node.view(torch.uint8).numpy(),
        planes.numpy(),
        num_used.numpy(),
        mask.view(torch.uint8).numpy(),
        is_full_mask,
    )
    token_ids, parents, positions, next_token, next_sibling, slots = planes.unbind()
    return HostLayout(
        DraftNodes(token_ids, parents, num_used),
        VerifyLayout(positions, next_token, next_sibling, mask),
        slots,
        is_model_node,
    )


def merge(nodes: DraftNodes, trees: EagleTrees, rows: torch.Tensor | None) -> torch.Tensor:
    """layout.merge_eagle_trees on the host."""
    # On a CPU these are the tensors themselves.
    on_host = nodes.token_ids.cpu(), nodes.parents.cpu(), nodes.num_used.cpu()
    is_model_node = torch.zeros(nodes.token_ids.shape, dtype=torch.bool)
    _merge(
        *on_host,
        is_model_node.view(torch.uint8),
        None if rows is None else rows.cpu(),
        trees.token_ids.cpu().contiguous(),
        trees.parent_list.cpu().contiguous(),
        trees.top_scores_index.cpu().contiguous(),
        trees.topk,
        None if trees.ranks is None else trees.ranks.cpu().contiguous(),
        trees.num_kept.cpu(),
    )
    written = nodes.token_ids, nodes.parents, nodes.num_used
    for values, of_host in zip(written, on_host, strict=True):
        values.copy_(of_host)
    return is_model_node.to(nodes.token_ids.device)


def lay_out(
    nodes: DraftNodes, seq_lens: torch.Tensor, mask: torch.Tensor, *, is_full_mask: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, first children and next siblings of the nodes, int64[n, w] each, and their
    visibility in its place in the mask, of bool or uint8."""
    positions, next_token, next_sibling = torch.empty((3, *nodes.parents.shape), dtype=torch.int64)
    cells = mask.view(torch.uint8).cpu()
    _lay_out(
        nodes.parents.cpu(),
        nodes.num_used.cpu(),
        seq_lens.cpu(),
        positions,
        next_token,
        next_sibling,
        cells,
        is_full_mask,
    )
    mask.view(torch.uint8).copy_(cells)
    device = mask.device
    return positions.to(device), next_token.to(device), next_sibling.to(device)
