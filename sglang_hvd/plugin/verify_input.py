"""The input of SGLang's verification, and what was accepted of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.speculative.eagle_info import EagleVerifyInput


@dataclass
class HvdVerifyInput(EagleVerifyInput):
    """SGLang's verify input for trees of any shape, as deep as the verify width.

    Attributes:
        of_model: bool[n, w]; the slots that the model drafter's tree has, None if it did not draft.
        has_branches: an accepted path need not stand at the front of its row, as it does in chains.
    """

    of_model: torch.Tensor | None = None
    has_branches: bool = True

    @property
    def max_tree_depth(self) -> int:
        """Nodes on the longest possible path, root included: a chain fills the width."""
        return self.draft_token_num

    @property
    def tree_topk(self) -> int:
        """-1: no fixed number of children per node."""
        return -1


def num_accepted_of_model(accept_index: torch.Tensor, of_model: torch.Tensor) -> torch.Tensor:
    """How many tokens of each model drafter's draft were right: int64[n].

    Args:
        accept_index: int[n, depth]; the accepted slots of all requests, numbered through, the root
            first; -1 behind them.
        of_model: bool[n, w].
    """
    is_accepted = accept_index >= 0
    is_accepted[:, 0] = False  # the root
    slots = accept_index.clamp(min=0).to(torch.int64)
    return (of_model.reshape(-1)[slots] & is_accepted).sum(dim=1)
