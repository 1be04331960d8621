"""What each number of the model drafter's steps has of its own: an attention backend, and graphs.

SGLang's multi-step backends lay a draft's KV slots out for one number of steps, and a captured
draft loop runs all of its steps. So each number that a plan may choose gets a backend and, where
drafts are captured, a graph of its own, as SGLang's adaptive speculation has for each number of
steps (EAGLEWorkerV2.build_adaptive_runtime_state).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.utils.common import log_info_on_rank0

if TYPE_CHECKING:
    from sglang_hvd.plugin.device_memory import DeviceMemory
    from sglang_hvd.plugin.worker import HvdWorker

logger = logging.getLogger(__name__)

# What the first number of steps may take.
_FIRST_GB = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _DraftState:
    """memory_gb: that it took, as the device reports it."""

    backend: Any
    graphs: Any
    memory_gb: float


class DraftStates:
    """Built once SGLang has the backend and the graphs of all steps.

    Fewer steps come first, which take least memory, as long as some is left for what prefills take.
    """

    def __init__(self, worker: HvdWorker, num_steps: Sequence[int], memory: DeviceMemory) -> None:
        """num_steps: to choose from, rising; the last is SGLang's own."""
        self._worker, self._drafter = worker, worker._draft_worker
        drafter = self._drafter
        of_all = _DraftState(drafter.draft_attn_backend, drafter.cuda_graph_runner, 0.0)
        self._of_steps = {num_steps[-1]: of_all}
        most_gb = _FIRST_GB
        for steps in num_steps[:-1]:
            if of_all.graphs is not None:  # else next to no memory is taken
                free_gb, needed_gb = memory.free_gb(), memory.spare_gb + most_gb
                if free_gb < needed_gb:
                    log_info_on_rank0(
                        logger,
                        f"HVD: {free_gb:.2f} GB are free and {needed_gb:.2f} would be needed to "
                        f"draft in {steps} steps: the model drafter has {self.num_steps} to choose "
                        "from. A lower --mem-fraction-static makes room for more.",
                    )
                    break
            self._of_steps[steps] = self._build(steps, memory)
            if steps > 1:  # indices and what graphs keep grow with it
                most_gb = 2 * max(self._of_steps[steps].memory_gb, 0.0)

    @property
    def num_steps(self) -> tuple[int, ...]:
        """Those to choose from, rising."""
        return tuple(sorted(self._of_steps))

    @property
    def memory_gb(self) -> dict[int, float]:
        """What each takes beside all steps, which every server has."""
        return {steps: round(self._of_steps[steps].memory_gb, 2) for steps in self.num_steps[:-1]}

    @contextmanager
    def use(self, num_steps: int) -> Iterator[Any]:
        """Drafts in so many steps meanwhile. Yields the graphs of the draft loop, or None."""
        drafter, state = self._drafter, self._of_steps[num_steps]
        before = drafter.speculative_num_steps, drafter.draft_attn_backend
        self._set(num_steps, state.backend)
        try:
            yield state.graphs
        finally:
            self._set(*before)

    def _set(self, num_steps: int, backend: Any) -> None:
        self._drafter.speculative_num_steps = num_steps
        self._drafter.draft_attn_backend = backend
        self._drafter.draft_runner.draft_attn_backend = backend

    def _build(self, num_steps: int, memory: DeviceMemory) -> _DraftState:
        if num_steps == 1:  # it only selects, without a forward
            return _DraftState(None, None, 0.0)

        def build() -> tuple[Any, Any]:
            drafter, graphs = self._drafter, self._drafter.cuda_graph_runner
            widest = self._worker.speculative_num_draft_tokens
            with self._worker._override_worker_state(num_steps, widest), drafter.drafting():
                drafter.init_attention_backend()
                if graphs is not None:
                    graphs = type(graphs)(drafter)
                return drafter.draft_attn_backend, graphs

        (backend, graphs), taken_gb = memory.build(
            build,
            name=f"drafts of {num_steps} steps",
            remedy="lower --mem-fraction-static, or name a policy other than allocate",
        )
        if graphs is not None:
            log_info_on_rank0(logger, f"HVD: drafts of {num_steps} steps take {taken_gb:.2f} GB")
        return _DraftState(backend, graphs, taken_gb)
