"""FlashInfer's plans, made from lengths that the host has, so that it need not wait for the device.

A plan cuts the attention of a verification or a draft into work for the device, and needs the
length of each request. FlashInfer's own plans read lengths back from the device, four times in a
verification. The host then waits for everything that it has launched, the model drafter's rounds
included, instead of preparing the verification.

The lengths are on the host by then, and SGLang has plans that use them: for draft-extends, for
drafts under SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR, and for verifications of chains under
SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN. These plans cannot tell a tree from a chain: both are the
same number of tokens for each request, and their masks are packed bit by bit.

This module switches the plans for drafts and for verifications on. A variable that is set to 0
keeps SGLang's default.

A plan is made in host memory and copied to the device from there. Without the waits, the host could
overwrite it with the next plan of the same graph before the copy: a fence keeps the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from sglang.kernels.ops.speculative.pack_verify_mask import pack_verify_mask_into
from sglang.srt.environ import EnvField, envs
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, fast_prefill_plan
from sglang.srt.runtime_context import attention_backends, get_spec

# Data types of the KV cache in SGLang's own condition for such plans.
_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def plan_drafts_on_host() -> None:
    """Plans drafts on the host from now on in this process, unless SGLang's variable is set."""
    if not envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR.is_set():
        envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR.set(True)


def plan_verifications_on_host(backend: Any) -> bool:
    """Plans verifications on the host from now on, for the graphs that a target's attention backend
    has captured. Graphs that are captured later have FlashInfer's own plans.

    Returns whether there are such graphs. They need FlashInfer's FA2 kernels, and layers that all
    attend to whole texts.
    """
    if _is_off(envs.SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN):
        return False
    # This graph replays what a plan launched, but not the host's part, so the lengths would never
    # change. FlashInfer's own plans cannot be captured, so they are made again each time.
    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        return False
    if type(backend) is not FlashInferAttnBackend or not _has_lengths_of_plans(backend):
        return False
    captured = backend.prefill_cuda_graph_metadata.values()
    for wrapper in (wrapper for wrappers in captured for wrapper in wrappers):
        wrapper.begin_forward = partial(fast_prefill_plan, wrapper)
    return bool(captured)


def _is_off(variable: EnvField) -> bool:
    return variable.is_set() and not variable.get()


def _has_lengths_of_plans(backend: FlashInferAttnBackend) -> bool:
    """Whether the backend fulfils what fast_prefill_plan asks for."""
    return (
        backend.prefill_backend == "fa2"
        and backend.dispatch_reason is None  # otherwise layers attend to different parts of a text
        and backend.flashinfer_kv_cache_dtype in _DTYPES
    )


def uses_flashinfer() -> bool:
    """Whether any of the target model's attention is FlashInfer's."""
    return "flashinfer" in attention_backends()


def warm_up(device: torch.device, widths: Sequence[int]) -> None:
    """Compiles the kernel that packs the masks of verifications, once for each width."""
    for width in widths:
        pack_verify_mask_into(
            torch.ones(width * width, dtype=torch.bool, device=device),
            torch.tensor([0, width], dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
            torch.zeros(width * width, dtype=torch.uint8, device=device),
            batch_size=1,
            query_width=width,
            max_kv_len=width,
        )


class PlanFence:
    """Keeps the next plan from overwriting one that the device still needs.

    is_needed: the plans are FlashInfer's, on a GPU. Otherwise there is no wait.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self._reached = torch.cuda.Event() if is_needed else None

    @classmethod
    def of(cls, device: str) -> PlanFence:
        """The fence of this server. The drafter and the target may have different backends."""
        is_drafters = get_spec().speculative_draft_attention_backend == "flashinfer"
        return cls(is_needed=device == "cuda" and (uses_flashinfer() or is_drafters))

    def wait(self) -> None:
        """Waits until the device has reached the last `record`."""
        if self._reached is not None:
            self._reached.synchronize()

    def record(self) -> None:
        """Marks that the plan was launched, with or without the work that it plans."""
        if self._reached is not None:
            self._reached.record()
