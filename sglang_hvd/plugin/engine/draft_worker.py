"""The draft side: the model drafter where a request needs it, one verify tree per request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_common import prepare_for_draft
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

from sglang_hvd.allocation import DraftExtend, max_tree_nodes
from sglang_hvd.plugin.device.flashinfer_plans import PlanFence
from sglang_hvd.plugin.device.host_transfer import to_device
from sglang_hvd.plugin.engine.catch_up import CatchUp
from sglang_hvd.plugin.engine.drafting import rows_of
from sglang_hvd.plugin.engine.served_costs import ServedCosts
from sglang_hvd.plugin.startup.launch import launch_of
from sglang_hvd.plugin.trees.draft_trees import DraftNodes, EagleTrees
from sglang_hvd.plugin.trees.layout import merge_eagle_trees
from sglang_hvd.plugin.trees.verify_input import HvdVerifyInput, build_verify_input
from sglang_hvd.step_clock import Phase, StepClock
from sglang_hvd.types import DraftPlans, HostDrafts

if TYPE_CHECKING:
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_hvd.plugin.engine.draft_states import DraftStates
    from sglang_hvd.plugin.engine.width_states import WidthStates
    from sglang_hvd.plugin.requests.held_requests import HeldRequests


# Parents, indices, tokens and ranks, as HvdDraftWorker.draft_forward returns them.
_Tree = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


class HvdDraftWorker(EagleDraftWorker):
    """EAGLE's draft worker with widths of its own.

    `speculative_num_draft_tokens` is the base width, as everywhere in SGLang. A step verifies at
    the narrowest of the launch's widths that holds its drafts, and draft-extend follows, unless it
    is postponed. The model drafter's own tree has `_model_tree_width` nodes, root included, or
    as many of the most probable of them as a plan asks for.
    """

    speculative_num_draft_tokens: int
    speculative_num_steps: int

    # See attach.
    costs: ServedCosts
    draft_extend: DraftExtend
    catch_up: CatchUp | None = None
    # Set by HvdWorker once backends and graphs are there.
    draft_states: DraftStates
    width_states: WidthStates | None = None

    def __init__(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        launch = launch_of(server_args)
        assert launch is not None, "HvdDraftWorker was built without a launch"
        self._model_tree_width = launch.model_tree_width
        self._widths = launch.widths
        self._cuts_trees = launch.config.policy == "allocate"
        self._step_width = launch.widths.base
        self._num_plain = 0  # see DraftExtend
        self._cached_lens: list[int] = []  # of the step's requests
        self.num_model_draft_rounds = 0
        self.num_partial_draft_rounds = 0  # for some requests of the batch only
        self.num_steps_by_width = dict.fromkeys(launch.widths.values, 0)
        self.clock = StepClock()
        super().__init__(server_args, *args, **kwargs)
        self.num_drafts_by_steps: Counter[int] = Counter()
        self._extended = PlanFence.of(self.device)

    def attach(
        self,
        *,
        held: HeldRequests,
        costs: ServedCosts,
        draft_extend: DraftExtend,
        stub_draft_extend: Callable[[ScheduleBatch, GenerationBatchResult], None],
    ) -> None:
        """Takes what HvdWorker makes once this worker and its model are there.

        Args:
            held: plans the drafts of requests, and knows how much of them is cached.
            costs: gets the times of drafts and draft-extends.
            stub_draft_extend: stands in for a draft-extend that does not follow verification.
        """
        self._held, self.costs = held, costs
        self._stub_draft_extend = stub_draft_extend
        self.use_draft_extend(draft_extend)

    def draft(self, batch: ScheduleBatch, *, with_topology: bool = False) -> HvdVerifyInput:
        """Choose a draft for every request and lay all of them out for one verification."""
        assert not with_topology, "pipeline parallelism is refused at start"
        assert not batch.forward_mode.is_idle(), "data-parallel attention is refused at start"
        seq_lens = batch.seq_lens_cpu.tolist() if batch.seq_lens_cpu is not None else None
        # Of a grammar SGLang waits for each token.
        plans = self._held.plan(batch.reqs, seq_lens, next_waits=batch.has_grammar)
        width = self._widths.narrowest(1 + int(plans.num_nodes.max()))
        self._num_plain = self._num_plain + 1 if width == 1 else 0
        bonus_tokens = batch.spec_info.bonus_tokens
        if self.catch_up is not None:
            cached_lens = self._held.cached_lens(batch.reqs) if seq_lens is None else seq_lens
            num_model_nodes = plans.num_model_nodes.tolist()
            self._cached_lens = cached_lens
            rows = self.catch_up.due_rows(batch.reqs, num_model_nodes, cached_lens, self._num_plain)
            if rows:
                self.use_base_width()
                self.catch_up.run(batch, rows, cached_lens)
        self.use_width(width)
        self.num_steps_by_width[self._step_width] += 1
        nodes = self._host_nodes(plans.drafts, bonus_tokens)
        kv_loc_plan = is_model_node = None
        is_drafting = plans.num_model_nodes > 0
        if is_drafting.any():
            is_model_node, kv_loc_plan = self._add_model_trees(batch, plans, nodes)
        with self.clock.measure(Phase.BUILD):
            verify_input = build_verify_input(
                nodes,
                batch.seq_lens,
                topk=self.topk,
                num_cached=self._num_cached(batch),
                mask_mode=self.mask_mode,
                verify_mask=self.target_worker.model_runner.attn_backend.verify_mask,
                is_model_node=is_model_node,
                kv_loc_plan=kv_loc_plan,
            )
        # A model tree branches; a model chain branches only beside a cache draft.
        branch = is_drafting if self.topk > 1 else is_drafting & (plans.drafts.num_nodes > 0)
        verify_input.has_branches = bool((branch | plans.drafts.are_trees).any())
        return verify_input

    def use_width_states(self, states: WidthStates) -> None:
        """Each width has attention backends and graphs of its own, and there are no others."""
        self.width_states = states
        self._widths = self._widths.only(states.widths)
        self.num_steps_by_width = dict.fromkeys(states.widths, 0)

    def use_draft_extend(self, draft_extend: DraftExtend) -> None:
        """Before any step: when draft-extend runs."""
        self.draft_extend = draft_extend
        self.catch_up = (
            CatchUp(self, draft_extend, costs=self.costs, clock=self.clock)
            if draft_extend.catches_up
            else None
        )

    def ends_run(self, num_requests: int) -> bool:
        """Whether the next step of so many requests has to wait, to catch up."""
        return self.catch_up is not None and self.catch_up.ends_run(num_requests)

    def use_base_width(self) -> None:
        """For a prefill, or what is like one: graphs of whole prefills belong to the attention
        backends that SGLang began with."""
        self.use_width(self._widths.base)

    def use_width(self, width: int) -> None:
        """The next verification has this one of the launch's widths, and so has draft-extend."""
        self._step_width = width
        if self.width_states is not None:
            self.width_states.use(width)

    @property
    def mask_mode(self) -> TreeMaskMode:
        """How the target's attention reads which nodes see which."""
        verify_mask = self.target_worker.model_runner.attn_backend.verify_mask
        return self.tree_mask_mode if verify_mask is None else verify_mask.mode

    def run_draft(self, forward_batch: ForwardBatch, num_steps: int) -> _Tree:
        """The model drafter's draft of a batch that was prepared for so many steps."""
        with self.draft_states.active(num_steps) as graphs:
            if graphs is not None and graphs.can_run_graph(forward_batch):
                return graphs.execute(forward_batch)
            if num_steps > 1:  # one step only selects, without a forward
                self.draft_attn_backend.init_forward_metadata(forward_batch)
                forward_batch.mark_forward_metadata_ready()
            return self.draft_forward(forward_batch)

    def draft_forward(self, forward_batch: ForwardBatch) -> Any:
        """EAGLE's draft loop, which selects the nodes of the model drafter's tree at its end.

        Returns what SGLang's does, but in the place of draft probabilities, which only rejection
        sampling has, int64[n, m]: the place of each node by its score; None where no tree is cut.
        """
        with (
            self._num_draft_tokens(self._tree_width),
            _ranking_nodes(self._cuts_trees) as ranks,
        ):
            parent_list, top_scores_index, draft_tokens, _ = super().draft_forward(forward_batch)
        return parent_list, top_scores_index, draft_tokens, ranks[0] if ranks else None

    def _draft_extend_for_decode(
        self, batch: ScheduleBatch, batch_result: GenerationBatchResult, **kwargs: Any
    ) -> None:
        if self.draft_extend.follows(self._num_plain):
            # Before a step that runs ahead the device is not there yet; it has that step's
            # verification to do meanwhile.
            self._extended.wait()
            timing = self.costs.time_extend(len(batch.reqs), self._step_width)
            with self._num_draft_tokens(self._step_width), timing:
                super()._draft_extend_for_decode(batch, batch_result, **kwargs)
            self._extended.record()
            return
        self._stub_draft_extend(batch, batch_result)
        if self.catch_up is not None:
            self.catch_up.keep(batch.reqs, self._cached_lens, batch_result)

    def _draft_extend_for_prefill(
        self,
        batch: ScheduleBatch,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Now, while the target's prefill runs: behind the draft model's, the first tokens' copy to
        # the host would wait for that too.
        self._held.record_prefill(batch.reqs, batch.chunked_req, next_token_ids)
        if self.catch_up is not None:
            self.catch_up.forget(batch.reqs)
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

    def _host_nodes(self, drafts: HostDrafts, bonus_tokens: torch.Tensor) -> DraftNodes:
        """The drafts the host knows: cache drafts; a bare root for every other request."""
        n, w = len(drafts), self._step_width
        # One array, one transfer: w columns of tokens, w of parents, the number of used nodes.
        with self.clock.measure(Phase.BUILD):
            rows = np.zeros((n, 2 * w + 1), dtype=np.int64)
            longest = drafts.token_ids.shape[1]
            rows[:, 1 : 1 + longest] = drafts.token_ids
            rows[:, w + 1 : w + 1 + longest] = drafts.parents + 1
            rows[:, 2 * w] = 1 + drafts.num_nodes
        with self.clock.measure(Phase.TRANSFER):
            on_device = to_device(rows, self.device)
        token_ids = on_device[:, :w]
        token_ids[:, 0] = bonus_tokens
        return DraftNodes(token_ids, on_device[:, w : 2 * w], on_device[:, 2 * w])

    def _add_model_trees(
        self, batch: ScheduleBatch, plans: DraftPlans, nodes: DraftNodes
    ) -> tuple[torch.Tensor, KVLocPlan | None]:
        """Run the model drafter for the requests that want its trees, and add these to the nodes.

        Returns bool[n, w], the slots that its trees have, and the plan of the KV window.
        """
        drafting = np.flatnonzero(plans.num_model_nodes)
        sizes = plans.num_model_nodes[drafting].astype(np.int64)
        is_all = len(drafting) == len(plans)
        with self.clock.measure(Phase.TRANSFER):
            wanted = to_device(sizes, self.device)
            rows = None if is_all else to_device(drafting, self.device)
        self.num_partial_draft_rounds += not is_all
        drafting_batch = batch if rows is None else rows_of(batch, drafting.tolist(), rows)
        num_steps = plans.num_model_steps
        self.num_drafts_by_steps[num_steps] += 1
        with self.costs.time_draft(len(drafting), num_steps):
            (parent_list, top_scores_index, draft_tokens, ranks), kv_loc_plan = (
                self._run_model_drafter(drafting_batch, num_steps)
            )
        with self.clock.measure(Phase.BUILD):
            if (sizes >= draft_tokens.shape[1]).all():
                ranks = None
            else:
                assert ranks is not None, "only trees are cut, and by policy allocate"
            trees = EagleTrees(
                draft_tokens, parent_list, top_scores_index, self.topk, ranks, num_kept=wanted
            )
            is_model_node = merge_eagle_trees(nodes, trees, rows)
        # A plan of the KV window is of the requests that drafted, and verification has all.
        return is_model_node, kv_loc_plan if is_all else None

    def _run_model_drafter(
        self, batch: ScheduleBatch, num_steps: int
    ) -> tuple[_Tree, KVLocPlan | None]:
        # EagleDraftWorker.draft up to the tree it selects. Its own ending would lay out and mask
        # a verification of the model drafter's tree alone, at the model drafter's width.
        self.num_model_draft_rounds += 1
        forward_batch, _, kv_loc_plan = prepare_for_draft(
            batch.spec_info,
            self.req_to_token_pool,
            batch,
            None,  # run_draft knows the graphs
            self.draft_runner,
            self.topk,
            num_steps,
            target_translator=self.target_worker.model_runner.kv_index_translator,
            num_draft_tokens=self._step_width,  # the window of a chain is what is verified
        )
        return self.run_draft(forward_batch, num_steps), kv_loc_plan

    def _num_cached(self, batch: ScheduleBatch) -> int:
        """Tokens in the KV cache of all requests, or more where the host does not know."""
        num_cached: int | None = batch.seq_lens_sum
        if num_cached is not None:
            return num_cached
        # No host copy: what the drafter counts, and room, or a mask might be written past its
        # end. The whole context of every request would be as safe, and gigabytes to fill.
        n = len(batch.reqs)
        longest = n * self.target_worker.model_runner.model_config.context_len
        return min(sum(self._held.cached_lens(batch.reqs)) + n * self._step_width, longest)

    @contextmanager
    def _num_draft_tokens(self, width: int) -> Iterator[None]:
        """SGLang's code meanwhile gives a request so many nodes, root included."""
        base_width = self.speculative_num_draft_tokens
        self.speculative_num_draft_tokens = width
        try:
            yield
        finally:
            self.speculative_num_draft_tokens = base_width


@contextmanager
def _ranking_nodes(is_on: bool) -> Iterator[list[torch.Tensor]]:
    """Yields a list that gets the ranks of the nodes that SGLang selects meanwhile: it selects the
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
        # Of equal scores the earlier: no node comes before its parent.
        order = torch.argsort(of_nodes, dim=1, descending=True, stable=True)
        ranks.append(torch.argsort(order, dim=1))
        return selected

    eagle_worker_v2.organize_draft_results = organize
    try:
        yield ranks
    finally:
        eagle_worker_v2.organize_draft_results = original
