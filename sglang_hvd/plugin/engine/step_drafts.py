"""The drafts of a step as SGLang verifies them: the model drafter's trees, merged with cache drafts
and laid out as one verify tree for each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.speculative.eagle_worker_common import prepare_for_draft

from sglang_hvd.plugin.engine.draft_worker import DraftLoopOutput, HvdDraftWorker, rows_of
from sglang_hvd.plugin.engine.served_costs import ServedCosts
from sglang_hvd.plugin.engine.states.step_states import StepStates
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.plugin.trees.draft_trees import DraftNodes, EagleTrees
from sglang_hvd.plugin.trees.host_layout import lay_out_drafts
from sglang_hvd.plugin.trees.layout import merge_eagle_trees
from sglang_hvd.plugin.trees.verify_input import (
    HvdVerifyInput,
    MaskPlace,
    build_verify_input,
    verify_input_of,
)
from sglang_hvd.step_clock import Phase, StepClock

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan


@dataclass(frozen=True, slots=True, eq=False)
class ModelTrees:
    """What the model drafter drafted for some requests of a step.

    rows: int64[num_drafting] on the device, the requests that drafted; None: all of them.
    kv_loc_plan: plan of the batch's KV window; None unless all of its requests drafted.
    """

    trees: EagleTrees
    rows: torch.Tensor | None
    kv_loc_plan: KVLocPlan | None


class StepDrafts:
    """Runs the model drafter for the requests that a plan names, and lays out all drafts."""

    def __init__(
        self,
        draft_worker: HvdDraftWorker,
        states: StepStates,
        *,
        costs: ServedCosts,
        clock: StepClock,
    ) -> None:
        self._draft_worker, self._states = draft_worker, states
        self._target = draft_worker.target_worker.model_runner
        self._device = draft_worker.device
        self.topk = draft_worker.topk
        self._costs, self._clock = costs, clock
        self._num_draft_rounds = 0
        self._num_partial_draft_rounds = 0  # for some requests of the batch only
        self._num_steps_by_width = dict.fromkeys(states.widths.values, 0)
        self._num_drafts_by_steps: Counter[int] = Counter()

    def arrays(self, plan: StepPlan) -> dict[str, npt.NDArray[np.int64]]:
        """The plan's arrays that go to the device, by name."""
        found: dict[str, npt.NDArray[np.int64]] = {}
        with self._clock.measure(Phase.BUILD):
            if self._device != "cpu" and plan.width > 1:
                found["cache_nodes"] = _cache_nodes(plan)
            drafting = plan.drafting_rows
            if len(drafting):
                found["num_kept"] = plan.drafts.num_model_nodes[drafting].astype(np.int64)
                if len(drafting) < len(plan.held):
                    found["drafting_rows"] = drafting
        return found

    def draft(
        self, batch: ScheduleBatch, plan: StepPlan, sent: Mapping[str, torch.Tensor]
    ) -> ModelTrees | None:
        """The model drafter's trees; None if the plan asks for none. sent: `arrays` on the
        device."""
        drafting = plan.drafting_rows
        if not len(drafting):
            return None
        is_all = len(drafting) == len(plan.held)
        rows = None if is_all else sent["drafting_rows"]
        self._num_draft_rounds += 1
        self._num_partial_draft_rounds += not is_all
        num_steps = plan.drafts.num_model_steps
        self._num_drafts_by_steps[num_steps] += 1
        some = batch if rows is None else rows_of(batch, drafting.tolist(), rows)
        with self._costs.time_draft(len(drafting), num_steps):
            (parent_list, top_scores_index, draft_tokens, ranks), kv_loc_plan = (
                self._run_model_drafter(some, num_steps, plan.width)
            )
        if (plan.drafts.num_model_nodes[drafting] >= draft_tokens.shape[1]).all():
            ranks = None
        elif ranks is None:
            # Only policy allocate ranks nodes by score. Elsewhere a request that limits its draft
            # verifies the first nodes: every node comes after its parent.
            ranks = torch.arange(draft_tokens.shape[1], device=self._device).expand_as(draft_tokens)
        trees = EagleTrees(
            draft_tokens, parent_list, top_scores_index, self.topk, ranks, sent["num_kept"]
        )
        # Verification needs a plan of the KV window of all requests, not of those that drafted.
        return ModelTrees(trees, rows, kv_loc_plan if is_all else None)

    def lay_out(
        self,
        batch: ScheduleBatch,
        plan: StepPlan,
        model_trees: ModelTrees | None,
        sent: Mapping[str, torch.Tensor],
    ) -> HvdVerifyInput:
        """All drafts of the step, as the input of its verification. sent: `arrays` on the
        device."""
        self._num_steps_by_width[plan.width] += 1
        backend = self._target.attn_backend
        place = MaskPlace(self._draft_worker.mask_mode, backend.verify_mask)
        with self._clock.measure(Phase.BUILD):
            if self._device == "cpu":
                verify_input = self._on_host(batch, plan, model_trees, place)
            else:
                roots = batch.spec_info.bonus_tokens
                if plan.width == 1:
                    nodes = DraftNodes.of_roots(roots, 1)
                else:
                    nodes = _with_roots(sent["cache_nodes"], roots)
                verify_input = self._on_device(batch, plan, model_trees, place, nodes)
        # A model tree branches; a model chain branches only in addition to a cache draft.
        cache_drafts, is_drafting = plan.drafts.drafts, plan.drafts.num_model_nodes > 0
        branch = is_drafting if self.topk > 1 else is_drafting & (cache_drafts.num_nodes > 0)
        verify_input.has_branches = bool((branch | cache_drafts.are_trees).any())
        return verify_input

    def describe(self) -> dict[str, Any]:
        """For /server_info; plain values."""
        return {
            "num_model_draft_rounds": self._num_draft_rounds,
            "num_partial_draft_rounds": self._num_partial_draft_rounds,
            "num_steps_by_width": dict(self._num_steps_by_width),
            "num_drafts_by_steps": dict(sorted(self._num_drafts_by_steps.items())),
        }

    def _on_host(
        self,
        batch: ScheduleBatch,
        plan: StepPlan,
        model_trees: ModelTrees | None,
        place: MaskPlace,
    ) -> HvdVerifyInput:
        n, w = len(plan.held), plan.width
        buffer, num_cells = place.cells(n, w, self._num_cached(batch, plan))
        mask = buffer
        if mask is None:
            mask = torch.empty(num_cells if place.is_full else n * w * w, dtype=torch.bool)
        found = lay_out_drafts(
            plan.drafts.drafts,
            batch.spec_info.bonus_tokens.to(torch.int64),
            batch.seq_lens.to(torch.int64),
            w,
            mask[:num_cells] if place.is_full else mask,
            is_full_mask=place.is_full,
            trees=None if model_trees is None else model_trees.trees,
            rows=None if model_trees is None else model_trees.rows,
        )
        return verify_input_of(
            found.nodes,
            replace(found.layout, mask=mask),
            found.slots,
            topk=self.topk,
            is_model_node=found.is_model_node,
            kv_loc_plan=None if model_trees is None else model_trees.kv_loc_plan,
        )

    def _on_device(
        self,
        batch: ScheduleBatch,
        plan: StepPlan,
        model_trees: ModelTrees | None,
        place: MaskPlace,
        nodes: DraftNodes,
    ) -> HvdVerifyInput:
        is_model_node = kv_loc_plan = None
        if model_trees is not None:
            is_model_node = merge_eagle_trees(nodes, model_trees.trees, model_trees.rows)
            kv_loc_plan = model_trees.kv_loc_plan
        return build_verify_input(
            nodes,
            batch.seq_lens,
            place,
            topk=self.topk,
            num_cached=self._num_cached(batch, plan),
            is_model_node=is_model_node,
            kv_loc_plan=kv_loc_plan,
        )

    def _run_model_drafter(
        self, batch: ScheduleBatch, num_steps: int, width: int
    ) -> tuple[DraftLoopOutput, KVLocPlan | None]:
        """Runs EagleDraftWorker.draft up to the selection of the tree. The rest of that method
        would lay out a verification of this tree alone.

        width: width of the verification, which is the KV window of a chain.
        """
        forward_batch, _, kv_loc_plan = prepare_for_draft(
            batch.spec_info,
            self._draft_worker.req_to_token_pool,
            batch,
            None,  # DraftStates.run knows the graphs
            self._draft_worker.draft_runner,
            self.topk,
            num_steps,
            target_translator=self._target.kv_index_translator,
            num_draft_tokens=width,
        )
        return self._states.of_draft_steps.run(forward_batch, num_steps), kv_loc_plan

    def _num_cached(self, batch: ScheduleBatch, plan: StepPlan) -> int:
        """Tokens of all requests in the KV cache; an upper bound if the host does not know."""
        num_cached: int | None = batch.seq_lens_sum
        if num_cached is not None:
            return num_cached
        # Without lengths from SGLang, an upper bound sizes the mask, so that no write goes past its
        # end. The full context of every request would do too, but takes gigabytes to fill.
        n = len(batch.reqs)
        longest = n * self._target.model_config.context_len
        return min(int(plan.cached_lens.sum()) + n * plan.width, longest)


def _cache_nodes(plan: StepPlan) -> npt.NDArray[np.int64]:
    """The cache drafts, and a bare root for every request without one: of each request w columns of
    tokens, w of parents, and the number of nodes. The root's token is not known here."""
    drafts, w = plan.drafts.drafts, plan.width
    rows = np.zeros((len(drafts), 2 * w + 1), dtype=np.int64)
    longest = drafts.token_ids.shape[1]
    rows[:, 1 : 1 + longest] = drafts.token_ids
    rows[:, w + 1 : w + 1 + longest] = drafts.parents + 1
    rows[:, 2 * w] = 1 + drafts.num_nodes
    return rows


def _with_roots(cache_nodes: torch.Tensor, roots: torch.Tensor) -> DraftNodes:
    """cache_nodes: see _cache_nodes; written in place. roots: int[n]; the last committed tokens."""
    w = cache_nodes.shape[1] // 2
    token_ids = cache_nodes[:, :w]
    token_ids[:, 0] = roots
    return DraftNodes(token_ids, cache_nodes[:, w : 2 * w], cache_nodes[:, 2 * w])
