"""What each verify width has of its own: attention backends and captured graphs.

SGLang's backends take the width of a verification from the settings when they are made, and a graph
is captured at one width. So each width gets a target backend, a draft-extend backend and, where
graphs are captured, those of target-verify and draft-extend; the draft loop has no width and its
graphs are shared. This is what SGLang's adaptive speculation keeps for each number of steps
(EAGLEWorkerV2.build_adaptive_runtime_state), without its own draft graphs and without a change of
the settings while serving.

Widths that were asked for are built or the start fails; those of the default, the narrowest first,
as long as memory is left for what prefills take. One that is wider than the base has graphs for as
few requests as may verify it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_exec
from sglang.srt.utils.common import log_info_on_rank0

from sglang_hvd.allocation import MOST_WIDE_REQUESTS

if TYPE_CHECKING:
    from sglang_hvd.plugin.device_memory import DeviceMemory
    from sglang_hvd.plugin.verify_widths import VerifyWidths
    from sglang_hvd.plugin.worker import HvdWorker

logger = logging.getLogger(__name__)

# What the first width of the default may take: FlashInfer's workspace of .4 to .5 GB, and what it
# keeps for each captured batch size.
_FIRST_GB = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _WidthState:
    """memory_gb: that it took, as the device reports it."""

    target_backend: Any
    target_graphs: Any
    extend_backend: Any
    extend_graphs: Any
    memory_gb: float


class WidthStates:
    """Built once the base width has its backends and graphs, the way SGLang builds them."""

    def __init__(self, worker: HvdWorker, widths: VerifyWidths, memory: DeviceMemory) -> None:
        self._worker, self._base_width = worker, widths.base
        self._target = worker.target_worker.model_runner
        self._drafter = worker._draft_worker
        self._of_width = {widths.base: self._present(0.0)}
        if _remembers_accepted(self._target.attn_backend):
            # Each width's backend would remember its own last verification, not the last one.
            if widths.asked_for:
                raise ValueError(
                    "HVD does not support several verify widths with this model's fused KDA "
                    "verification: drop --hvd-narrow-widths and --hvd-wide-width, or do not "
                    "disable the radix cache"
                )
            log_info_on_rank0(logger, "HVD: fused KDA verifications have one width")
            return
        most_gb, is_full = _FIRST_GB, False
        for width in widths.values:
            if width == widths.base:
                continue
            if width not in widths.asked_for:
                is_full = is_full or not memory.has_room(most_gb, name=f"verify width {width}")
                if is_full:
                    continue
            self._of_width[width] = self._build(width, memory)
            # Workspaces are of one size; masks and the indices of graphs grow with the nodes of a
            # step, which at most double in the widths of the default.
            most_gb = 2 * max(self._of_width[width].memory_gb, 0.0)

    @property
    def widths(self) -> tuple[int, ...]:
        """Those that were built, rising."""
        return tuple(sorted(self._of_width))

    @property
    def memory_gb(self) -> dict[int, float]:
        """What each width takes beside the base, which every server has."""
        return {
            width: round(self._of_width[width].memory_gb, 2)
            for width in self.widths
            if width != self._base_width
        }

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

    def _build(self, width: int, memory: DeviceMemory) -> _WidthState:
        worker = self._worker
        before = self._present(0.0)

        def build() -> _WidthState:
            with (
                worker._override_worker_state(worker.speculative_num_steps, width),
                _capturing_few(width > self._base_width),
            ):
                if self._drafter.stub_draft_extend is None:  # else none follows verification
                    self._build_extend(before)
                self._build_verify(before, width)
                return self._present(0.0)

        state, taken_gb = memory.build(
            build,
            name=f"verify width {width}",
            remedy="lower --mem-fraction-static or name fewer with --hvd-narrow-widths or "
            "--hvd-wide-width",
        )
        self._target.attn_backend = before.target_backend
        self._target.decode_cuda_graph_runner = before.target_graphs
        log_info_on_rank0(logger, f"HVD: verify width {width} takes {taken_gb:.2f} GB")
        return replace(state, memory_gb=taken_gb)

    def _build_extend(self, before: _WidthState) -> None:
        drafter = self._drafter
        if before.extend_graphs is not None:
            # Runners share this buffer, capture with what is in it, and fill it at each replay.
            width = drafter.speculative_num_draft_tokens
            before.extend_graphs.buffers.extend_seq_lens.fill_(width)
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


@contextmanager
def _capturing_few(is_on: bool) -> Iterator[None]:
    """Graphs are captured for no more requests than may verify more than the base."""
    config = get_exec().graph.cuda_graph_config if is_on else None
    if config is None or not config.decode.bs:
        yield
        return
    all_sizes = config.decode.bs
    few = [num for num in all_sizes if num <= MOST_WIDE_REQUESTS]
    config.decode.bs = few or [MOST_WIDE_REQUESTS]
    try:
        yield
    finally:
        config.decode.bs = all_sizes


def _remembers_accepted(backend: Any) -> bool:
    """Whether a verification reads from the target's attention backend how much of each request's
    last one was accepted."""
    linear = getattr(backend, "linear_attn_backend", None)
    return linear is not None and linear.accept_lens_pool is not None
