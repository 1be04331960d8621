"""The input of SGLang's verification, and the accepted tokens of the model drafter in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from sglang_hvd.plugin.trees.draft_trees import DraftNodes, VerifyLayout
from sglang_hvd.plugin.trees.layout import lay_out

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

# The tokens after each accepted node, the numbers of accepted nodes, and their slots; as SGLang's
# eagle_sample returns them.
Accepted: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class HvdVerifyInput(EagleVerifyInput):
    """SGLang's verify input for trees of any shape, as deep as the verify width.

    Attributes:
        num_nodes: int64[n]; the nodes that each request verifies, root included.
        is_model_node: bool[n, w]; the slots that the model drafter's tree has; None if it did not
            draft.
        has_branches: an accepted path may not be at the front of its row, as it is in chains.
        nodes: the trees before the layout.
        sample: what takes the place of SGLang's eagle_sample, called with this input, the logits
            and the grammar's mask.
    """

    num_nodes: torch.Tensor | None = None
    is_model_node: torch.Tensor | None = None
    has_branches: bool = True
    nodes: DraftNodes | None = None
    sample: Callable[[Any, LogitsProcessorOutput, GrammarMask | None], Accepted] | None = None

    @property
    def max_tree_depth(self) -> int:
        """Nodes on the longest possible path, root included: a chain fills the width."""
        return self.draft_token_num

    @property
    def tree_topk(self) -> int:
        """-1: no fixed number of children per node."""
        return -1


@dataclass(frozen=True, slots=True)
class MaskPlace:
    """Where the mask of a target's verifications is written.

    mode: of the attention backend.
    verify_mask: mask of that backend; None if it owns none.
    """

    mode: TreeMaskMode
    verify_mask: VerifyMask | None

    @property
    def is_full(self) -> bool:
        """Whether the mask has cells for the committed prefix."""
        return self.mode == TreeMaskMode.FULL_MASK

    def cells(self, n: int, w: int, num_cached: int) -> tuple[torch.Tensor | None, int]:
        """The buffer to write into, None for a new one, and the number of cells of a full mask.

        num_cached: tokens of all requests in the KV cache, or more.
        """
        buffer, num_cells = None, w * (num_cached + n * w)
        if self.verify_mask is not None and self.verify_mask.fits(n):
            buffer = self.verify_mask.buffer
            # A captured batch is padded with requests of length 1; an empty row would become NaN.
            num_cells += (self.verify_mask.max_bs - n) * w * (1 + w)
            num_cells = min(num_cells, buffer.numel())
        return buffer, num_cells


def build_verify_input(
    nodes: DraftNodes,
    seq_lens: torch.Tensor,
    place: MaskPlace,
    *,
    topk: int,
    num_cached: int,
    is_model_node: torch.Tensor | None = None,
    kv_loc_plan: KVLocPlan | None = None,
) -> HvdVerifyInput:
    """Lays drafts out for their verification.

    Args:
        seq_lens: int[n]; committed tokens in the KV cache.
        topk: the model drafter's topk.
        num_cached: see MaskPlace.cells.
        is_model_node: see HvdVerifyInput.
        kv_loc_plan: plan of the KV window of these requests, if there is one already.
    """
    n, w = nodes.token_ids.shape
    buffer, num_cells = place.cells(n, w, num_cached)
    layout = lay_out(
        nodes, seq_lens.to(torch.int64), mode=place.mode, num_cells=num_cells, buffer=buffer
    )
    slots = torch.arange(n * w, device=nodes.token_ids.device).view(n, w)
    return verify_input_of(
        nodes, layout, slots, topk=topk, is_model_node=is_model_node, kv_loc_plan=kv_loc_plan
    )


def verify_input_of(
    nodes: DraftNodes,
    layout: VerifyLayout,
    slots: torch.Tensor,
    *,
    topk: int,
    is_model_node: torch.Tensor | None,
    kv_loc_plan: KVLocPlan | None,
) -> HvdVerifyInput:
    """SGLang's input of drafts that are laid out. slots: int64[n, w], numbered across all requests.
    Other arguments as in build_verify_input."""
    n, w = nodes.token_ids.shape
    assert kv_loc_plan is None or kv_loc_plan.write_virtual.numel() == n * w, "another window"
    return HvdVerifyInput(
        # Contiguous, since SGLang's kernels refuse a column of a wider tensor.
        draft_token=nodes.token_ids.contiguous().view(-1),
        custom_mask=layout.mask,
        positions=layout.positions.reshape(-1),
        retrieve_index=slots,
        retrieve_next_token=layout.next_token,
        retrieve_next_sibling=layout.next_sibling,
        retrieve_cum_len=None,
        spec_steps=w - 1,
        topk=topk,
        draft_token_num=w,
        capture_hidden_mode=None,
        seq_lens_sum=None,
        seq_lens_cpu=None,
        kv_loc_plan=kv_loc_plan,
        prepared_out_cache_loc=None if kv_loc_plan is None else kv_loc_plan.write_virtual,
        num_nodes=nodes.num_used,
        is_model_node=is_model_node,
        nodes=nodes,
    )


def num_accepted_of_model(accept_index: torch.Tensor, is_model_node: torch.Tensor) -> torch.Tensor:
    """The number of tokens of each model drafter's draft that were right: int[n], as accept_index.

    Args:
        accept_index: int[n, depth]; the accepted slots of each request, the root first, numbered
            across all requests; -1 after them.
        is_model_node: bool[n, w].
    """
    is_accepted = accept_index >= 0
    is_accepted[:, 0] = False  # the root
    slots = accept_index.clamp(min=0).to(torch.int64)
    is_right = is_model_node.reshape(-1)[slots] & is_accepted
    return is_right.sum(dim=1, dtype=accept_index.dtype)
