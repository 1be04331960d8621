"""The drafts of a batch as trees on the target's device, before and after the layout.

Shapes: `n` requests, `w` the verify width (nodes per request, root included).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DraftNodes:
    """Draft trees of a batch in topological order: a node stands after its parent.

    Attributes:
        token_ids: int64[n, w]; column 0 is the root, the last committed token.
        parents: int64[n, w]; index of the parent node, ignored for the root and unused slots.
        num_used: int64[n]; the used slots of a row, root included, at least 1.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    num_used: torch.Tensor

    @classmethod
    def of_roots(cls, roots: torch.Tensor, width: int) -> DraftNodes:
        """Requests without a draft. roots: int[n]; the last committed tokens."""
        token_ids = torch.zeros((len(roots), width), dtype=torch.int64, device=roots.device)
        token_ids[:, 0] = roots
        return cls(token_ids, torch.zeros_like(token_ids), torch.ones_like(token_ids[:, 0]))


@dataclass(frozen=True, slots=True)
class EagleTrees:
    """The model drafter's trees of `k` requests as EAGLE's draft loop leaves them, `m` nodes each.

    Attributes:
        token_ids: int64[k, m].
        parent_list: int64[k, 1 + (num_steps - 1) * topk], or of width 0 for one step; the
            candidate index of the parent of each group of topk candidates.
        top_scores_index: int64[k, m]; candidate index of each selected node, ascending. A node
            whose parent was not selected, which can happen with equal scores, is not verified.
            The layout is that of SGLang's build_tree_efficient kernel.
        topk: candidates per expanded node.
        ranks: int64[k, m]; the place of each node by its probability. None: all nodes are kept.
        num_kept: int64[k]; how many of the most probable nodes are verified.
    """

    token_ids: torch.Tensor
    parent_list: torch.Tensor
    top_scores_index: torch.Tensor
    topk: int
    ranks: torch.Tensor | None
    num_kept: torch.Tensor


@dataclass(frozen=True, slots=True)
class VerifyLayout:
    """The trees of a batch as SGLang verifies them.

    Attributes:
        positions: int64[n, w]; position of each node in its request's text.
        next_token: int64[n, w]; first child of a node, -1 if it has none.
        next_sibling: int64[n, w]; next child of the same parent, -1 if there is none.
        mask: bool or uint8, whether node i attends to node j: itself and its ancestors. In mode
            QLEN_ONLY the mask has w x w cells for each request. In mode FULL_MASK it has, packed
            request after request, w rows of seq_len + w cells, all true over the committed
            prefix. An unused slot sees the root and itself, since FA3 sums mask rows and no row
            may be empty. Its position follows the root's; it has no links, so it is never
            accepted.
    """

    positions: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class HostLayout:
    """The drafts of a batch, merged and laid out on the host.

    slots: int64[n, w]; the slots, numbered across all requests.
    is_model_node: bool[n, w]; the slots of the model drafter's tree; None if it did not draft.
    """

    nodes: DraftNodes
    layout: VerifyLayout
    slots: torch.Tensor
    is_model_node: torch.Tensor | None
