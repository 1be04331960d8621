"""SGLang's CPU attention backend on plain-torch operators."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from sgl_kernel.attention import (
    RequestGroup,
    decode_attention_cpu,
    extend_attention_cpu,
    plan_attention,
)
from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend


class TorchAttentionBackend(IntelAMXAttnBackend):
    """IntelAMXAttnBackend that groups the requests once per forward pass, not once per layer.

    It serves as `torch_native` and replaces its parent, so that the drafter's multi-step backend is
    made of it too.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.decode_attention_fwd = partial(decode_attention_cpu, planner=self._plan_once)
        self.extend_attention_fwd = partial(extend_attention_cpu, planner=self._plan_once)
        self._plan: Sequence[RequestGroup] = ()
        self._planned_for: object = None

    def _plan_once(self, **batch: Any) -> Sequence[RequestGroup]:
        # Every forward pass begins with a new forward_metadata.
        if self._planned_for is not self.forward_metadata:
            # What is only proposed need not be equal to the last bit.
            is_draft_step = self.draft_decode_metadata is not None
            dtype = torch.float32 if is_draft_step else torch.float64
            self._plan = plan_attention(**batch, dtype=dtype)
            self._planned_for = self.forward_metadata
        return self._plan
