"""What each verify width has of its own: attention backends and captured graphs.

SGLang's backends take the width of a verification from the settings when they are made, and a graph
is captured at one width. So each width gets a target backend, a draft-extend backend and, where
graphs are captured, those of target-verify and draft-extend; the draft loop has no width and its
graphs are shared. This is what SGLang's adaptive speculation keeps for each number of steps
(EAGLEWorkerV2.build_adaptive_runtime_state), without its own draft graphs and without a change of
the settings while serving: KV windows follow these, and stay those of the widest.

The KV pool is sized before. Widths that were asked for are built or the start fails; those of the
default, the narrowest first, as long as memory is left for what prefills take.
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

# What widths of the default leave free for prefills and sampling, beside some for what nothing
# here counts: a third of the 1.5 MB that SGLang sets aside, for it and for graphs, per token of a
# chunked prefill, and the arrays of logits that sampling holds at a time.
_SPARE_GB, _GB_PER_PREFILL_TOKEN, _LOGIT_ARRAYS = 1.0, 0.5 / 1024, 3


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

    def __init__(
        self, worker: HvdWorker, widths: Sequence[int], *, ranks: Any, are_asked_for: bool
    ) -> None:
        """widths: rising; the last is the one that SGLang was started with.

        ranks: CPU group of the tensor-parallel ranks, which build the same widths; None for one.
        are_asked_for: all of them are built, whatever memory is left.
        """
        self._worker, self._ranks = worker, ranks
        self._target = worker.target_worker.model_runner
        self._drafter = worker._draft_worker
        self._of_width = {widths[-1]: self._present(0.0)}
        spare_gb = _spare_gb(worker, widths[-1])
        gb_per_node = 0.0  # of the width before: masks and the indices of graphs grow with it
        for width in widths[:-1]:
            free_gb, needed_gb = self._free_gb(), spare_gb + gb_per_node * width
            if not are_asked_for and free_gb < needed_gb:
                log_info_on_rank0(
                    logger,
                    f"HVD: {free_gb:.2f} GB are free and {needed_gb:.2f} would be needed "
                    f"for verify width {width}: it is left out, and so are wider ones but the "
                    "widest. A lower --mem-fraction-static makes room for them.",
                )
                break
            self._of_width[width] = self._build(width)
            gb_per_node = max(self._of_width[width].memory_gb, 0.0) / width

    @property
    def widths(self) -> tuple[int, ...]:
        """Those that were built, rising."""
        return tuple(sorted(self._of_width))

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

    def _free_gb(self) -> float:
        """Of the rank that has least."""
        return get_available_gpu_memory(
            self._worker.device,
            self._worker.gpu_id,
            distributed=self._ranks is not None,
            cpu_group=self._ranks,
        )

    def _build(self, width: int) -> _WidthState:
        worker = self._worker
        before = self._present(0.0)
        free_gb = self._free_gb()
        try:
            with worker._override_worker_state(worker.speculative_num_steps, width):
                if self._drafter.stub_draft_extend is None:  # else none follows verification
                    self._build_extend(before)
                self._build_verify(before, width)
                state = self._present(0.0)
        except Exception as error:
            # SGLang wraps what goes wrong while graphs are captured.
            if not isinstance(error.__context__ or error, torch.cuda.OutOfMemoryError):
                raise
            raise RuntimeError(
                f"no memory is left for verify width {width}: lower --mem-fraction-static or name "
                "fewer with --hvd-narrow-widths"
            ) from error
        self._target.attn_backend = before.target_backend
        self._target.decode_cuda_graph_runner = before.target_graphs
        taken_gb = free_gb - self._free_gb()
        log_info_on_rank0(logger, f"HVD: verify width {width} takes {taken_gb:.2f} GB")
        return replace(state, memory_gb=taken_gb)

    def _build_extend(self, before: _WidthState) -> None:
        drafter = self._drafter
        with drafter.drafting():
            drafter.init_attention_backend()
            if before.extend_graphs is not None:
                drafter.cuda_graph_runner_for_draft_extend = type(before.extend_graphs)(drafter)

    def _build_verify(self, before: _WidthState, width: int) -> None:
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
                speculative_num_steps=self._worker.speculative_num_steps,
                speculative_num_draft_tokens=width,
            )


def _spare_gb(worker: HvdWorker, widest: int) -> float:
    args, target = worker.server_args, worker.target_worker.model_runner
    logits = target.max_running_requests * widest * target.model_config.vocab_size * 4 / 2**30
    prefill = max(args.chunked_prefill_size or 0, 0) * _GB_PER_PREFILL_TOKEN
    return _SPARE_GB + prefill + _LOGIT_ARRAYS * logits
