"""FlashInfer's plans, made of lengths that the host has: it need not wait for the device.

A plan cuts the attention of a verification or a draft into work for the device, and needs the
length of each request. FlashInfer's own reads lengths back from the device, four times in a
verification, and the host waits for all that it has launched, the model drafter's rounds too, where
it could prepare the verification. The lengths are on the host by then, and SGLang has plans that
are made of them. It uses these for draft-extends, for drafts under
SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR, and for verifications of chains under
SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN. A tree differs from a chain in nothing that they look at: it
is as many tokens of each request, whose mask is packed bit by bit.

Here both are on. The two variables, set to 0, leave SGLang's defaults.

A plan is made in memory that it is copied to the device from. Without the waits the host could make
the next plan of the same graph before the device has got so far: a fence keeps the two apart.
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

# Of the KV cache; those that SGLang's own condition has.
_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def plan_drafts_on_host() -> None:
    """From now on, in this process, unless SGLang's variable says otherwise."""
    if not envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR.is_set():
        envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR.set(True)


def plan_verifications_on_host(backend: Any) -> bool:
    """The graphs that a target's attention backend has captured get such plans from now on.

    Returns whether there are any: of FlashInfer's FA2 kernels, and where all layers attend to whole
    texts. Whatever is captured later has FlashInfer's own plans.
    """
    if _is_off(envs.SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN):
        return False
    # It replays what a plan had launched, without the host's part: the lengths would stay the same.
    # FlashInfer's own plans cannot be captured, so that it leaves these alone.
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
    """What fast_prefill_plan asks for."""
    return (
        backend.prefill_backend == "fa2"
        and backend.dispatch_reason is None  # else layers differ in what they attend to
        and backend.flashinfer_kv_cache_dtype in _DTYPES
    )


def uses_flashinfer() -> bool:
    """Whether any of the target model's attention is FlashInfer's."""
    return "flashinfer" in attention_backends()


def warm_up(device: torch.device, widths: Sequence[int]) -> None:
    """Compiles the kernel that packs masks of verifications, of each width one."""
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
    """Between what the device does by one plan, and the next plan in the same memory.

    is_needed: the plans are FlashInfer's, on a GPU; else nothing is waited for.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self._reached = torch.cuda.Event() if is_needed else None

    @classmethod
    def of(cls, device: str) -> PlanFence:
        """That of this server, whose drafter may have another attention than the target."""
        is_drafters = get_spec().speculative_draft_attention_backend == "flashinfer"
        return cls(is_needed=device == "cuda" and (uses_flashinfer() or is_drafters))

    def wait(self) -> None:
        """Until the device has come to where `record` was called last."""
        if self._reached is not None:
            self._reached.synchronize()

    def record(self) -> None:
        """The plan was launched, with or without what is done by it."""
        if self._reached is not None:
            self._reached.record()
