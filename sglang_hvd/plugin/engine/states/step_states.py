"""What a server built for its steps: backends and graphs of each width and number of draft steps.

They are built once, after SGLang's own backends and graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_hvd.allocation import DraftExtend, VerifyWidths, max_tree_nodes
from sglang_hvd.plugin.device import flashinfer_plans
from sglang_hvd.plugin.device.memory import DeviceMemory
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.engine.states.draft_states import DraftStates
from sglang_hvd.plugin.engine.states.width_states import WidthStates
from sglang_hvd.plugin.startup.launch import HvdLaunch
from sglang_hvd.plugin.trees import accepted_kv
from sglang_hvd.plugin.trees.layout import warm_up

if TYPE_CHECKING:
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

# EAGLE3 reads so many hidden states of a token, each from another layer.
_NUM_HIDDEN_STATES = 3


@dataclass(frozen=True, slots=True, eq=False)
class StepStates:
    """The widths and numbers of draft steps that a server can choose from.

    widths: those that were built.
    of_widths: None where the attention backends read the width of each batch, and where there is
        one width.
    of_draft_steps: those of each number of draft steps.
    has_host_plans: verifications are planned from lengths that the host has
        (device/flashinfer_plans.py).
    """

    widths: VerifyWidths
    of_widths: WidthStates | None
    of_draft_steps: DraftStates
    has_host_plans: bool

    @classmethod
    def build(
        cls,
        worker: EAGLEWorkerV2,
        launch: HvdLaunch,
        draft_step_choices: tuple[int, ...],
        draft_extend: DraftExtend,
        ranks: RankGroup,
    ) -> StepStates:
        """Builds the states of the widths first, then those of the draft steps, as far as memory
        allows.

        worker: has the backends and graphs of the base width and of all draft steps.
        draft_step_choices: rising; the last is SGLang's own.
        """
        target = worker.target_worker.model_runner
        max_nodes = launch.widths.max_nodes(target.max_running_requests)
        has_host_plans = flashinfer_plans.plan_verifications_on_host(target.attn_backend)
        memory = DeviceMemory(
            target,
            device=worker.device,
            gpu_id=worker.gpu_id,
            max_nodes=max_nodes,
            ranks=ranks,
            kept_gb=_kept_gb(target, draft_extend, max_nodes),
        )
        widths, of_widths = launch.widths, None
        if launch.has_width_states:
            has_draft_extend = draft_extend.follows(num_plain=0)
            of_widths = WidthStates(worker, widths, memory, has_draft_extend=has_draft_extend)
            widths = widths.only(of_widths.widths)
        of_draft_steps = DraftStates(worker, draft_step_choices, memory)
        states = cls(widths, of_widths, of_draft_steps, has_host_plans)
        states._compile_kernels(worker, launch.num_model_nodes)
        return states

    def use_width(self, width: int) -> None:
        """The next verification and draft-extend have this width."""
        if self.of_widths is not None:
            self.of_widths.use(width)

    def use_base_width(self) -> None:
        """For a prefill, and for a forward that is like one: graphs of whole prefills belong to the
        attention backends that SGLang made first."""
        self.use_width(self.widths.base)

    def describe(self) -> dict[str, Any]:
        """For /server_info; plain values."""
        return {
            "verify_width": self.widths.base,
            "verify_widths": list(self.widths.values),
            "width_memory_gb": None if self.of_widths is None else self.of_widths.memory_gb,
            "draft_steps": list(self.of_draft_steps.num_steps),
            "draft_steps_memory_gb": self.of_draft_steps.memory_gb,
            "host_plans": self.has_host_plans,
        }

    def _compile_kernels(self, worker: EAGLEWorkerV2, num_model_nodes: int) -> None:
        device, widths = torch.device(worker.device), self.widths.values
        warm_up(
            device,
            worker._draft_worker.mask_mode,
            widths,
            [
                min(num_model_nodes, max_tree_nodes(worker.topk, steps))
                for steps in self.of_draft_steps.num_steps
            ],
            worker.topk,
        )
        accepted_kv.warm_up(worker.target_worker.model_runner.token_to_kv_pool)
        if self.has_host_plans:
            flashinfer_plans.warm_up(device, widths)


def _kept_gb(target: Any, draft_extend: DraftExtend, max_nodes: int) -> float:
    """Memory of the hidden states that the draft KV cache lacks, and of as many again while it
    catches up. max_nodes: verified in a step."""
    of_token = _NUM_HIDDEN_STATES * target.model_config.hidden_size * target.dtype.itemsize
    return 2.0 * draft_extend.max_missing(max_nodes) * of_token / 2**30
