"""SGLang's draft worker, with a tree of its own width, and what each of its forwards needs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe.utils import (
    speculative_moe_a2a_backend_context,
    speculative_moe_backend_context,
)
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_hvd.allocation import max_tree_nodes
from sglang_hvd.plugin.device.context_room import room_after_context
from sglang_hvd.plugin.startup.launch import HvdLaunch

if TYPE_CHECKING:
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

# Parents, indices, tokens and ranks, as HvdDraftWorker.draft_forward returns them.
DraftLoopOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


class HvdDraftWorker(EagleDraftWorker):
    """EAGLE's draft worker, where verifications have another width than the model drafter's tree.

    `speculative_num_draft_tokens` is the base width, as everywhere in SGLang. The model drafter's
    own tree has `_model_tree_width` nodes, root included, or as many of the most probable of them
    as a plan asks for.
    """

    speculative_num_draft_tokens: int
    speculative_num_steps: int

    def __init__(
        self,
        *args: Any,
        launch: HvdLaunch,
        on_prefill: Callable[[ScheduleBatch, torch.Tensor], None],
        **kwargs: Any,
    ) -> None:
        """
        args, kwargs: of SGLang's worker.
        on_prefill: is called with each prefill and its tokens, between the target's prefill and the
            draft model's.
        """
        self._model_tree_width = launch.model_tree_width
        self._cuts_trees = launch.config.policy == "allocate"
        self._on_prefill = on_prefill
        super().__init__(*args, **kwargs)

    @property
    def mask_mode(self) -> TreeMaskMode:
        """How the target's attention reads which nodes see which."""
        verify_mask = self.target_worker.model_runner.attn_backend.verify_mask
        return self.tree_mask_mode if verify_mask is None else verify_mask.mode

    def init_attention_backend(self) -> None:
        """SGLang's own backends of drafts and draft-extends, with room after the context."""
        with room_after_context(self.draft_runner):
            super().init_attention_backend()

    def draft_forward(self, forward_batch: Any) -> Any:
        """EAGLE's draft loop, which selects the nodes of the model drafter's tree at its end.

        Returns what SGLang's loop does, except for the last value. In place of draft probabilities,
        which only rejection sampling has, that is int64[n, m]: the place of each node by its score;
        None where no tree is cut.
        """
        with (
            self._num_draft_tokens(self._tree_width),
            _ranking_nodes(self._cuts_trees) as ranks,
        ):
            parent_list, top_scores_index, draft_tokens, _ = super().draft_forward(forward_batch)
        return parent_list, top_scores_index, draft_tokens, ranks[0] if ranks else None

    def extend(
        self,
        batch: ScheduleBatch,
        result: GenerationBatchResult,
        width: int,
        kv_loc_plan: KVLocPlan | None,
    ) -> None:
        """Draft-extend of all requests after a verification of this width."""
        with self._num_draft_tokens(width):
            self._draft_extend_for_decode(batch, result, kv_loc_plan=kv_loc_plan)

    def _draft_extend_for_prefill(
        self,
        batch: ScheduleBatch,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Now, while the target's prefill runs: after the draft model's prefill was launched, the
        # first tokens' copy to the host would wait for that too.
        self._on_prefill(batch, next_token_ids)
        return super()._draft_extend_for_prefill(
            batch, target_hidden_states, next_token_ids, *args, **kwargs
        )

    def _rebuild_topk1_chain_buffers(self) -> None:
        with self._num_draft_tokens(self._tree_width):
            super()._rebuild_topk1_chain_buffers()

    @property
    def _tree_width(self) -> int:
        """Nodes of the model drafter's tree in the steps it drafts now, root included."""
        widest = 1 + max_tree_nodes(self.topk, self.speculative_num_steps)
        return min(self._model_tree_width, widest)

    @contextmanager
    def _num_draft_tokens(self, width: int) -> Iterator[None]:
        """SGLang's code gives each request so many nodes inside, root included."""
        base_width = self.speculative_num_draft_tokens
        self.speculative_num_draft_tokens = width
        try:
            yield
        finally:
            self.speculative_num_draft_tokens = base_width


@contextmanager
def drafting(draft_worker: EagleDraftWorker) -> Iterator[None]:
    """What SGLang sets up around everything that runs the draft model."""
    with (
        draft_tp_context(draft_worker.parallel_layout),
        speculative_moe_backend_context(),
        speculative_moe_a2a_backend_context(),
    ):
        yield


def rows_of(batch: ScheduleBatch, rows: list[int], on_device: torch.Tensor) -> ScheduleBatch:
    """These rows of a batch as a batch of their own, as far as forwards of the draft model read it.

    on_device: int64[len(rows)]; the rows, on the batch's device.
    """
    some = copy.copy(batch)
    some.reqs = [batch.reqs[row] for row in rows]
    some.multimodal_inputs = [batch.multimodal_inputs[row] for row in rows]
    some.seq_lens = batch.seq_lens[on_device]
    some.orig_seq_lens = batch.orig_seq_lens[on_device]
    some.req_pool_indices = batch.req_pool_indices[on_device]
    if batch.req_pool_indices_cpu is not None:
        some.req_pool_indices_cpu = batch.req_pool_indices_cpu[rows]
    some.seq_lens_sum = None
    if batch.seq_lens_cpu is not None:
        some.seq_lens_cpu = batch.seq_lens_cpu[rows]
        some.seq_lens_sum = int(some.seq_lens_cpu.sum())
    some.spec_info = copy.copy(batch.spec_info)
    # Under overlap scheduling filter_batch would cut only these, which the scheduler has used.
    some.spec_info.future_indices = None
    some.spec_info.filter_batch(on_device)
    return some


@contextmanager
def _ranking_nodes(is_on: bool) -> Iterator[list[torch.Tensor]]:
    """Yields a list that gets the ranks of the nodes that SGLang selects inside. SGLang selects the
    most probable candidates and drops their scores."""
    if not is_on:
        yield []
        return
    original, ranks = eagle_worker_v2.organize_draft_results, []

    def organize(
        scores: list[torch.Tensor], *lists: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        selected = original(scores, *lists)
        of_nodes = torch.cat(scores, dim=1).flatten(1).gather(1, selected[1])
        # The earlier one of equal scores comes first, so that no node comes before its parent.
        order = torch.argsort(of_nodes, dim=1, descending=True, stable=True)
        ranks.append(torch.argsort(order, dim=1))
        return selected

    eagle_worker_v2.organize_draft_results = organize
    try:
        yield ranks
    finally:
        eagle_worker_v2.organize_draft_results = original
