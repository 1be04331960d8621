"""The drafts of a batch as trees on the target's device, before and after they are laid out.

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


@dataclass(frozen=True, slots=True)
class EagleTrees:
    """The model drafter's trees of `k` requests as EAGLE's draft loop leaves them, `m` nodes each.

    Attributes:
        token_ids: int64[k, m].
        parent_list, top_scores_index, topk: see parents_of_eagle_tree.
        ranks: int64[k, m]; the place of each node by its probability. None: all are kept.
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
        positions: int64[n, w]; of each node in its request's text.
        next_token, next_sibling: see VerifyTree.
        mask: see pack_mask.
    """

    positions: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor
    mask: torch.Tensor
