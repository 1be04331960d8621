"""An attention backend and graphs for each number of steps that the model drafter may run.

SGLang's multi-step backends lay out a draft's KV slots for one number of steps, and a captured
draft loop runs all of its steps. So each number that a plan may choose gets a backend of its own,
and a graph where drafts are captured. SGLang's adaptive speculation does the same
(EAGLEWorkerV2.build_adaptive_runtime_state).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang.srt.utils.common import log_info_on_rank0

from sglang_hvd.plugin.device.graph_sizes import capturing, sizes_of_few_steps
from sglang_hvd.plugin.engine.draft_worker import drafting

if TYPE_CHECKING:
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    from sglang_hvd.plugin.device.memory import DeviceMemory

logger = logging.getLogger(__name__)

# The first number of steps is expected to take at most this much memory.
_FIRST_GB = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _DraftState:
    """What one number of steps has.

    chain: SGLang's two constants of a chain of so many tokens; both are None for a tree.
    memory_gb: memory that the device reports as taken by it.
    """

    num_steps: int
    backend: Any
    graphs: Any
    chain: tuple[Any, Any]
    memory_gb: float = 0.0


class DraftStates:
    """The numbers of steps to choose from. They are built once SGLang has the backend and graphs of
    all steps.

    The smallest numbers come first, because they take least memory, and only as long as prefills
    keep theirs.
    """

    def __init__(
        self, worker: EAGLEWorkerV2, num_steps: Sequence[int], memory: DeviceMemory
    ) -> None:
        """
        num_steps: to choose from, rising; the last is SGLang's own.
        """
        self._worker, self._draft_worker = worker, worker._draft_worker
        of_all = self._present(self._draft_worker.cuda_graph_runner)
        self._of_steps = {num_steps[-1]: of_all}
        before = None
        for steps in num_steps[:-1]:
            takes_memory = steps > 1 and of_all.graphs is not None
            max_gb = _FIRST_GB
            if before is not None:
                # Each step after the first has a backend, of which graphs keep a part. Its indices
                # grow with the steps.
                growth = max((steps - 1) / (before - 1), 2)
                max_gb = growth * self._of_steps[before].memory_gb
            if takes_memory and not memory.has_room(max_gb, name=f"drafts of {steps} steps"):
                break
            self._of_steps[steps] = self._build(steps, memory)
            before = steps if takes_memory else None

    @property
    def num_steps(self) -> tuple[int, ...]:
        """Numbers of steps to choose from, rising."""
        return tuple(sorted(self._of_steps))

    @property
    def memory_gb(self) -> dict[int, float]:
        """Memory that each number took. That of all steps, which every server has, is left out."""
        return {steps: round(self._of_steps[steps].memory_gb, 2) for steps in self.num_steps[:-1]}

    @contextmanager
    def active(self, num_steps: int) -> Iterator[Any]:
        """The model drafter drafts in so many steps inside. Yields the graphs of its loop, or
        None."""
        state, all_steps = self._of_steps[num_steps], self._of_steps[self.num_steps[-1]]
        self._set(state)
        try:
            yield state.graphs
        finally:
            self._set(all_steps)

    def run(
        self, forward_batch: ForwardBatch, num_steps: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The model drafter's draft of a batch that was prepared for so many steps, as
        HvdDraftWorker.draft_forward returns it."""
        draft_worker = self._draft_worker
        with self.active(num_steps) as graphs:
            if graphs is not None and graphs.can_run_graph(forward_batch):
                return graphs.execute(forward_batch)
            if num_steps > 1:  # one step only selects, without a forward
                draft_worker.draft_attn_backend.init_forward_metadata(forward_batch)
                forward_batch.mark_forward_metadata_ready()
            return draft_worker.draft_forward(forward_batch)

    def _set(self, state: _DraftState) -> None:
        draft_worker = self._draft_worker
        draft_worker.speculative_num_steps = state.num_steps
        draft_worker.draft_attn_backend = state.backend
        draft_worker.draft_runner.draft_attn_backend = state.backend
        parents, score_indices = state.chain
        draft_worker._topk1_parents_prealloc = parents
        draft_worker._topk1_score_indices_prealloc = score_indices

    def _present(self, graphs: Any) -> _DraftState:
        draft_worker = self._draft_worker
        return _DraftState(
            draft_worker.speculative_num_steps,
            draft_worker.draft_attn_backend,
            graphs,
            (draft_worker._topk1_parents_prealloc, draft_worker._topk1_score_indices_prealloc),
        )

    def _build(self, num_steps: int, memory: DeviceMemory) -> _DraftState:
        def build() -> _DraftState:
            worker, draft_worker = self._worker, self._draft_worker
            graphs = draft_worker.cuda_graph_runner
            base_width = worker.speculative_num_draft_tokens
            with worker._override_worker_state(num_steps, base_width), drafting(draft_worker):
                if num_steps == 1:  # it only selects, without a forward
                    draft_worker.draft_attn_backend = None
                    return self._present(None)
                draft_worker.init_attention_backend()
                if graphs is None:
                    return self._present(None)
                with capturing(sizes_of_few_steps(draft_worker.draft_runner)):
                    return self._present(type(graphs)(draft_worker))

        state, taken_gb = memory.build(
            build,
            name=f"drafts of {num_steps} steps",
            remedy="lower --mem-fraction-static, or name a policy other than allocate",
        )
        if state.graphs is not None:
            log_info_on_rank0(logger, f"HVD: drafts of {num_steps} steps take {taken_gb:.2f} GB")
        return replace(state, memory_gb=taken_gb)
