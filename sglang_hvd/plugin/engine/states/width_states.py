"""Attention backends and captured graphs for each verify width.

SGLang's backends read the width of a verification from the settings when they are made, and a graph
is captured at one width. So each width gets a target backend and a draft-extend backend and, where
graphs are captured, those of target-verify and draft-extend. The draft loop has no width: its
graphs are shared. SGLang's adaptive speculation keeps the same for each number of steps
(EAGLEWorkerV2.build_adaptive_runtime_state), but with draft graphs of its own, and it changes the
settings while it serves.

Widths that the settings name are built, or the start fails. Default widths follow, the fewest nodes
of a full step first, as long as prefills keep their memory. A width above the base has graphs only
for as many requests as may verify it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang.srt.utils.common import log_info_on_rank0

from sglang_hvd.allocation import VerifyWidths
from sglang_hvd.plugin.device.context_room import room_after_context
from sglang_hvd.plugin.device.flashinfer_plans import plan_verifications_on_host
from sglang_hvd.plugin.device.graph_sizes import capturing, needs_all_sizes, sizes_of_width
from sglang_hvd.plugin.engine.draft_worker import drafting

if TYPE_CHECKING:
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    from sglang_hvd.plugin.device.memory import DeviceMemory

logger = logging.getLogger(__name__)

# The first default width is expected to take at most this: FlashInfer keeps 8 MB for each captured
# batch size, once for the target and once for the drafter, of some 20 sizes up to 256 requests.
# Masks add to that.
_FIRST_GB = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _WidthState:
    """What one width has.

    memory_gb: memory that the device reports as taken by it.
    """

    target_backend: Any
    target_graphs: Any
    extend_backend: Any
    extend_graphs: Any
    memory_gb: float


class WidthStates:
    """The widths to choose from. They are built as SGLang builds the base width, after it."""

    def __init__(
        self,
        worker: EAGLEWorkerV2,
        widths: VerifyWidths,
        memory: DeviceMemory,
        *,
        has_draft_extend: bool,
    ) -> None:
        """
        has_draft_extend: draft-extend follows verifications, so that each width needs a backend and
            graphs for it.
        """
        self._worker, self._widths = worker, widths
        self._has_draft_extend = has_draft_extend
        self._target = worker.target_worker.model_runner
        self._draft_worker = worker._draft_worker
        graphs = self._target.decode_cuda_graph_runner
        self._captures = graphs is not None and graphs is not self._target.eager_runner
        self._of_width = {widths.base: self._present(0.0)}
        obstacle = _obstacle(self._target.attn_backend)
        if obstacle is not None:
            if widths.asked_for:
                raise ValueError(
                    f"HVD does not support --hvd-set narrow_widths with {obstacle.what}: "
                    f"{obstacle.remedy}"
                )
            log_info_on_rank0(logger, f"HVD: one verify width, because of {obstacle.what}")
            return
        besides_base = [width for width in widths.values if width != widths.base]
        for width in besides_base:
            if width in widths.asked_for:
                self._of_width[width] = self._build(width, memory)
        before = None
        for width in sorted(
            (width for width in besides_base if width not in widths.asked_for),
            key=self._max_nodes,
        ):
            # A width of 1 has hardly any masks, so that it says nothing about those of others.
            max_gb = max([_FIRST_GB, *(state.memory_gb for state in self._of_width.values())])
            if before is not None:
                # Masks grow with the nodes. What is kept for each batch size stays the same, but a
                # wide width, which has few batch sizes, may be the one before.
                growth = max(self._max_nodes(width) / self._max_nodes(before), 2)
                max_gb = max(growth * self._of_width[before].memory_gb, max_gb)
            if not memory.has_room(max_gb, name=f"verify width {width}"):
                break
            self._of_width[width] = self._build(width, memory)
            before = width if width > 1 else None

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths that were built, rising."""
        return tuple(sorted(self._of_width))

    @property
    def memory_gb(self) -> dict[int, float]:
        """Memory that each width took. That of the base, which every server has, is left out."""
        return {
            width: round(self._of_width[width].memory_gb, 2)
            for width in self.widths
            if width != self._widths.base
        }

    def use(self, width: int) -> None:
        """Verifications and draft-extends have this width from now on."""
        state = self._of_width[width]
        self._target.attn_backend = state.target_backend
        self._target.decode_cuda_graph_runner = state.target_graphs
        self._draft_worker.draft_extend_attn_backend = state.extend_backend
        if state.extend_backend is not None:
            self._draft_worker.draft_runner.attn_backend = state.extend_backend
        self._draft_worker.cuda_graph_runner_for_draft_extend = state.extend_graphs

    def _present(self, memory_gb: float) -> _WidthState:
        return _WidthState(
            self._target.attn_backend,
            self._target.decode_cuda_graph_runner,
            self._draft_worker.draft_extend_attn_backend,
            self._draft_worker.cuda_graph_runner_for_draft_extend,
            memory_gb,
        )

    def _build(self, width: int, memory: DeviceMemory) -> _WidthState:
        worker = self._worker
        before = self._present(0.0)

        def build() -> _WidthState:
            with (
                worker._override_worker_state(worker.speculative_num_steps, width),
                self._capturing(width),
            ):
                if self._has_draft_extend:
                    self._build_extend(before)
                self._build_verify(before, width)
                return self._present(0.0)

        state, taken_gb = memory.build(
            build,
            name=f"verify width {width}",
            remedy="lower --mem-fraction-static or name fewer with --hvd-set "
            "narrow_widths or wide_width",
        )
        self._target.attn_backend = before.target_backend
        self._target.decode_cuda_graph_runner = before.target_graphs
        log_info_on_rank0(logger, f"HVD: verify width {width} takes {taken_gb:.2f} GB")
        return replace(state, memory_gb=taken_gb)

    def _max_nodes(self, width: int) -> int:
        """Nodes of a full step at this width, of all requests together."""
        if self._captures:
            return width * sizes_of_width(self._target, self._widths, width)[-1]
        return width * self._widths.batch_limit(width, self._target.max_running_requests)

    @contextmanager
    def _capturing(self, width: int) -> Iterator[None]:
        """Only the batch sizes of this width are captured inside."""
        if not self._captures or (width < self._widths.base and needs_all_sizes(self._target)):
            yield
            return
        with capturing(sizes_of_width(self._target, self._widths, width)):
            yield

    def _build_extend(self, before: _WidthState) -> None:
        draft_worker = self._draft_worker
        if before.extend_graphs is not None:
            # Runners share this buffer: they capture with its content and fill it at each replay.
            width = draft_worker.speculative_num_draft_tokens
            before.extend_graphs.buffers.extend_seq_lens.fill_(width)
        with drafting(draft_worker):
            draft_worker.init_attention_backend()
            if before.extend_graphs is not None:
                graphs = type(before.extend_graphs)(draft_worker)
                draft_worker.cuda_graph_runner_for_draft_extend = graphs

    def _build_verify(self, before: _WidthState, width: int) -> None:
        target = self._target
        # All of FlashInfer's backends share one workspace of half a gigabyte: no two forwards run
        # at once, none reads what another wrote there, and plans lie elsewhere.
        with room_after_context(target):
            target.attn_backend = target._get_attention_backend()
        if self._captures:
            target.decode_cuda_graph_runner = type(before.target_graphs)(
                target,
                attn_backend=target.attn_backend,
                speculative_num_steps=self._worker.speculative_num_steps,
                speculative_num_draft_tokens=width,
            )
            plan_verifications_on_host(target.attn_backend)


@dataclass(frozen=True, slots=True)
class _Obstacle:
    """What limits all verifications to the base width, and what to do about it."""

    what: str
    remedy: str = "drop it"


def _obstacle(backend: Any) -> _Obstacle | None:
    """The obstacle in the target's attention backend; None if there is none."""
    linear = getattr(backend, "linear_attn_backend", None)
    if linear is None:
        return None
    # SGLang imports it only with models that have such layers.
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend

    # SGLang has room for the states of the base's nodes for each request, and reads the states at
    # these distances. The following kernels write them at the distances of the step's width.
    if isinstance(linear, Mamba2AttnBackend):  # mamba.py, cache_steps
        return _Obstacle("Mamba-2 layers")
    # Only the backend of GDN layers has it, whose module need not be importable for others.
    dispatcher = getattr(linear, "kernel_dispatcher", None)
    if getattr(dispatcher, "verify_kernel_is_flashinfer", False):
        return _Obstacle(  # flashinfer's gdn_kernels
            "FlashInfer's GDN verification", "drop it, or use --linear-attn-verify-backend triton"
        )
    if linear.accept_lens_pool is not None:
        # The backend itself holds what was accepted of a request's last verification, and each
        # width would have its own backend.
        return _Obstacle("fused KDA verification", "drop it, or do not disable the radix cache")
    return None
