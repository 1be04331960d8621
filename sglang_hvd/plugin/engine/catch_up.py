"""Carries out a postponed draft-extend. DraftExtend (allocation/draft_extend.py) decides when.

Draft-extend writes the committed tokens to the model drafter's KV cache. SGLang runs it after each
verification. This module postpones it for requests that do not draft, and later runs one forward
over all that they lack.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from sglang.srt.speculative.spec_utils import fast_topk, renorm_draft_probs

from sglang_hvd.allocation import DraftExtend
from sglang_hvd.config import HvdConfig, PostponeExtend
from sglang_hvd.plugin.engine.draft_worker import rows_of
from sglang_hvd.plugin.engine.missing_tokens import Ints, MissingTokens
from sglang_hvd.plugin.engine.served_costs import ServedCosts
from sglang_hvd.plugin.requests.held_requests import slots_of
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.step_clock import Phase, StepClock

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker


def draft_extend_of(config: HvdConfig, *, device: str, has_mrope: bool) -> DraftExtend:
    """Chooses when the server runs draft-extend.

    has_mrope: positions depend on more than a token's place, and catching up knows only that.
    """
    # On a GPU draft-extend runs while the host reads what was accepted; a postponed one waits for
    # that. After a step without drafts exactly one token per request is accepted, so that the next
    # step can launch immediately.
    on_gpu: PostponeExtend = "plain" if config.run_ahead else "never"
    found = DraftExtend.of(config, default="always" if device == "cpu" else on_gpu)
    return DraftExtend.EVERY_STEP if has_mrope and found.catches_up else found


@dataclass(frozen=True, slots=True, eq=False)
class Due:
    """Which requests of a step catch up.

    rows: of these requests in the batch.
    lengths: tokens that each of them lacks, at least 1.
    arrays: those that go to the device, by name.
    """

    rows: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    arrays: Mapping[str, Ints] = field(default_factory=dict)


class CatchUp:
    """Runs a postponed draft-extend for the requests whose turn it is.

    A step calls `due`, sends its arrays, calls `store`, and calls `run` if a request is due. After
    the verification it calls `keep` if no draft-extend follows. On a server that postpones nothing,
    no request is ever due.

    max_nodes: nodes of the largest step.
    """

    def __init__(
        self,
        draft_worker: EagleDraftWorker,
        draft_extend: DraftExtend,
        *,
        max_nodes: int,
        costs: ServedCosts,
        clock: StepClock,
    ) -> None:
        self.num_catch_ups = 0
        self._draft_worker = draft_worker
        self._draft_extend = draft_extend
        self._costs, self._clock = costs, clock
        self._missing = MissingTokens(draft_extend.max_missing(max_nodes))
        self._max_missing = 0  # of any request, after the last step

    def due(self, plan: StepPlan) -> Due:
        """The requests that catch up before the step's verification."""
        if not self._draft_extend.catches_up:
            return Due()
        with self._clock.measure(Phase.BUILD):
            return self._due(plan)

    def store(self, sent: Mapping[str, torch.Tensor]) -> None:
        """Stores what the last step committed. sent: Due.arrays on the device."""
        if self._draft_extend.catches_up:
            self._missing.store(sent["settled"])

    def run(
        self, batch: ScheduleBatch, plan: StepPlan, due: Due, sent: Mapping[str, torch.Tensor]
    ) -> None:
        """Writes the missing tokens of the due requests (at least one) to the draft KV cache, so
        that they can draft. The caller has set the worker to its base width.

        sent: Due.arrays on the device.
        """
        self.num_catch_ups += 1
        some = rows_of(batch, due.rows, sent["due_rows"])
        with self._time(len(due.rows), sum(due.lengths)):
            drafted = self._extend(some, due, plan.cached_lens[due.rows], sent)
        spec_info = copy.copy(batch.spec_info)
        for name, values in drafted.items():
            of_batch = getattr(spec_info, name)
            setattr(spec_info, name, of_batch.index_copy(0, sent["due_rows"], values))
        batch.spec_info = spec_info

    def keep(self, plan: StepPlan, result: GenerationBatchResult) -> None:
        """Keeps the tokens that the step committed, if requests catch up with them later."""
        if not self._draft_extend.catches_up:
            return
        self._max_missing += 1  # only runs of plain steps read it, which commit one token each
        self._missing.keep(
            plan.held.slots,
            plan.cached_lens,
            result.next_token_ids,
            result.logits_output.hidden_states,
        )

    def ends_run(self, num_requests: int) -> bool:
        """See DraftExtend. The last step may still run."""
        return self._draft_extend.ends_run(self._max_missing, num_requests)

    def forget(self, reqs: Sequence[Req]) -> None:
        """A prefill wrote all of the draft KV cache of these requests."""
        if self._draft_extend.catches_up:
            self._missing.forget(slots_of(reqs))

    def clear(self) -> None:
        """The KV caches are empty: every request that goes on is prefilled first."""
        self._max_missing = 0
        self._missing.clear()

    def _due(self, plan: StepPlan) -> Due:
        slots, cached_lens = plan.held.slots, plan.cached_lens
        settled = self._missing.settle(slots, cached_lens)
        num_missing, of_model = self._missing.num_of(slots), plan.drafts.num_model_nodes
        rows = self._draft_extend.catching_up(of_model, num_missing, plan.num_plain)
        self._max_missing = 0 if rows else int(num_missing.max())
        if not rows:
            return Due(arrays={"settled": settled})
        lengths, ends = num_missing[rows], cached_lens[rows]
        flat_ends = lengths.cumsum()
        positions = (ends - flat_ends).repeat(lengths) + np.arange(flat_ends[-1])
        return Due(
            rows,
            lengths.tolist(),
            {
                "settled": settled,
                "taken": self._missing.take(slots[rows]),
                "due_rows": np.array(rows),
                # Of each token: the row among those that are due, and the position.
                "due_cells": np.stack([np.arange(len(rows)).repeat(lengths), positions]),
            },
        )

    def _time(self, num_requests: int, num_tokens: int) -> AbstractContextManager[None]:
        if self._draft_extend is DraftExtend.WHEN_DRAFTING:
            return self._costs.time_extend(num_requests, round(num_tokens / num_requests))
        return self._costs.time_unpriced()  # the table has draft-extends of another kind

    def _extend(
        self,
        some: ScheduleBatch,
        due: Due,
        cached_lens: Ints,
        sent: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Runs the draft model over the tokens that these requests lack. Returns the inputs of
        their next drafts, by their names in SGLang's draft input."""
        draft_worker = self._draft_worker
        token_ids, hidden_states = self._missing.read(sent["taken"])
        rows, positions = sent["due_cells"]
        some.forward_mode = ForwardMode.EXTEND
        some.input_ids = token_ids.to(torch.int64)
        some.out_cache_loc = draft_worker.req_to_token_pool.req_to_token[
            some.req_pool_indices[rows], positions
        ].to(torch.int64)
        some.prefix_lens = (cached_lens - due.lengths).tolist()
        some.extend_lens = due.lengths
        some.extend_num_tokens = len(token_ids)
        some.seq_lens_cpu = torch.tensor(cached_lens)
        some.seq_lens_sum = int(cached_lens.sum())
        some.multimodal_inputs = [None] * len(cached_lens)
        # They name the states of the target's linear attention, for the whole batch.
        some.mamba_track_indices = some.mamba_track_mask = None
        some.mamba_track_seqlens = some.mamba_track_seqlens_cpu = None
        some.spec_info = EagleDraftExtendInput(
            hidden_states=hidden_states,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
        )
        forward_batch = ForwardBatch.init_new(
            some,
            draft_worker.draft_runner,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            return_hidden_states_before_norm=False,
        )
        forward_batch.return_logprob = False
        output = draft_worker.draft_runner.forward(forward_batch).logits_output
        # As EagleDraftWorker does after verification.
        if draft_worker.topk == 1:
            topk_index = output.next_token_logits.argmax(dim=-1, keepdim=True)
            topk_p = torch.ones_like(topk_index, dtype=torch.float32)
        else:
            probs = renorm_draft_probs(output.next_token_logits, None, False)
            topk_p, topk_index = fast_topk(probs, draft_worker.topk, dim=-1)
        return {
            "topk_p": topk_p,
            "topk_index": topk_index,
            "hidden_states": output.hidden_states,
        }
