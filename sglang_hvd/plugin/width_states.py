"""What each verify width has of its own: attention backends and captured graphs.

SGLang's backends take the width of a verification from the settings when they are made, and a graph
is captured at one width. So each width gets a target backend, a draft-extend backend and, where
graphs are captured, those of target-verify and draft-extend; the draft loop has no width and its
graphs are shared. This is what SGLang's adaptive speculation keeps for each number of steps
(EAGLEWorkerV2.build_adaptive_runtime_state), without its own draft graphs and without a change of
the settings while serving: KV windows follow these, and stay those of the widest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.utils.common import get_available_gpu_memory, log_info_on_rank0

if TYPE_CHECKING:
    from sglang_hvd.plugin.worker import HvdWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _WidthState:
    """memory_gb: that it took, as the device reports it."""

    target_backend: Any
    target_graphs: Any
    extend_backend: Any
    extend_graphs: Any
    memory_gb: float


class WidthStates:
    """Built once the widest width has its backends and graphs, the way SGLang builds them."""

    def __init__(self, worker: HvdWorker, widths: Sequence[int]) -> None:
        """widths: rising; the last is the one that SGLang was started with."""
        self._target = worker.target_worker.model_runner
        self._drafter = worker._draft_worker
        self._of_width = {widths[-1]: self._present(0.0)}
        for width in widths[:-1]:
            self._of_width[width] = self._build(worker, width)

    @property
    def memory_gb(self) -> dict[int, float]:
        """What each width takes beside the widest, which every server has."""
        widths = sorted(self._of_width)[:-1]
        return {width: round(self._of_width[width].memory_gb, 2) for width in widths}

    def use(self, width: int) -> None:
        """Verifies and extends at this width from now on."""
        state = self._of_width[width]
        self._target.attn_backend = state.target_backend
        self._target.decode_cuda_graph_runner = state.target_graphs
        self._drafter.draft_extend_attn_backend = state.extend_backend
        if state.extend_backend is not None:
            self._drafter.draft_runner.attn_backend = state.extend_backend
        self._drafter.cuda_graph_runner_for_draft_extend = state.extend_graphs

    def _present(self, memory_gb: float) -> _WidthState:
        return _WidthState(
            self._target.attn_backend,
            self._target.decode_cuda_graph_runner,
            self._drafter.draft_extend_attn_backend,
            self._drafter.cuda_graph_runner_for_draft_extend,
            memory_gb,
        )

    def _build(self, worker: HvdWorker, width: int) -> _WidthState:
        before = self._present(0.0)
        free_gb = get_available_gpu_memory(worker.device, worker.gpu_id)
        try:
            with worker._override_worker_state(worker.speculative_num_steps, width):
                if self._drafter.stub_draft_extend is None:  # else none follows verification
                    self._build_extend(before)
                self._build_verify(worker, before, width)
                state = self._present(0.0)
        except torch.cuda.OutOfMemoryError as error:
            raise RuntimeError(
                f"--hvd-narrow-widths: no memory is left for width {width}: lower "
                "--mem-fraction-static or name fewer widths"
            ) from error
        self._target.attn_backend = before.target_backend
        self._target.decode_cuda_graph_runner = before.target_graphs
        taken_gb = free_gb - get_available_gpu_memory(worker.device, worker.gpu_id)
        log_info_on_rank0(logger, f"HVD: verify width {width} takes {taken_gb:.2f} GB")
        return replace(state, memory_gb=taken_gb)

    def _build_extend(self, before: _WidthState) -> None:
        drafter = self._drafter
        with drafter.drafting():
            drafter.init_attention_backend()
            if before.extend_graphs is not None:
                drafter.cuda_graph_runner_for_draft_extend = type(before.extend_graphs)(drafter)

    def _build_verify(self, worker: HvdWorker, before: _WidthState, width: int) -> None:
        target = self._target
        had_new_workspace = target.init_new_workspace
        try:
            target.attn_backend = target._get_attention_backend(init_new_workspace=True)
        finally:
            target.init_new_workspace = had_new_workspace
        if before.target_graphs is not None and before.target_graphs is not target.eager_runner:
            target.decode_cuda_graph_runner = type(before.target_graphs)(
                target,
                attn_backend=target.attn_backend,
                speculative_num_steps=worker.speculative_num_steps,
                speculative_num_draft_tokens=width,
            )
