"""The changes to SGLang; patches/README.md says why each is needed and what it relies on."""

import pkgutil
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import sgl_kernel
import torch
import triton
from sgl_kernel.sampling import keep_min_p, keep_top_k, keep_top_p
from sglang.kernels.ops.sampling import renorm
from sglang.kernels.ops.speculative import verify_sampling
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode
from sglang.srt.arg_groups import choices as argument_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import attention_backends
from sglang.srt.speculative import eagle_utils

from sgl_kernel_cpu.attention_backend import TorchAttentionBackend

# Matrix products of fewer rows take kernels that round differently (measured with MKL, 1, 2 and 4
# threads: up to 11 rows), and a decode step would not repeat the logits of a verify step.
_MIN_ROWS = 16

_DETERMINISTIC_BACKENDS = (
    argument_choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    argument_choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
)

_min_ps: ContextVar[torch.Tensor | None] = ContextVar("_min_ps", default=None)


def install() -> None:
    """Register every hook and fill in the operators that SGLang leaves None on a CPU.

    Raises ImportError or AttributeError if SGLang lacks a name, RuntimeError if it has a name of
    its own where there was none.
    """
    for target in TARGETS:
        pkgutil.resolve_name(target)
    for module in (renorm, eagle_utils):
        _fill(module, "top_k_renorm_prob", keep_top_k)
        _fill(module, "top_p_renorm_prob", keep_top_p)
    for module in (verify_sampling, eagle_utils):
        _fill(module, "tree_speculative_sampling_target_only", sample_tree)
    for target, (hook, hook_type) in TARGETS.items():
        HookRegistry.register(target, hook, hook_type)
    register_attention_backend("torch_native")(TorchAttentionBackend)
    for backends in _DETERMINISTIC_BACKENDS:
        backends.append("torch_native")


def sample_tree(*, target_probs: torch.Tensor, candidates: torch.Tensor, **rest: Any) -> None:
    """`tree_speculative_sampling_target_only` that honours min_p, as SGLang's sampler does.

    eagle_sample hands over no min_ps: `_remember_min_ps` keeps them.
    """
    min_ps = _min_ps.get()
    if min_ps is not None:
        per_node = min_ps.repeat_interleave(candidates.shape[1])
        target_probs = keep_min_p(target_probs.flatten(0, 1), per_node).view_as(target_probs)
    sgl_kernel.tree_speculative_sampling_target_only(
        target_probs=target_probs, candidates=candidates, **rest
    )


def _remember_min_ps(
    eagle_sample: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    info = batch.sampling_info
    token = _min_ps.set(info.min_ps if info is not None and info.need_min_p_sampling else None)
    try:
        return eagle_sample(verify_input, batch, *args, **kwargs)
    finally:
        _min_ps.reset(token)


def _only_when_all_greedy(*, is_all_greedy: bool, **_: Any) -> bool:
    return is_all_greedy


def _stay_batch_invariant(_runner: Any) -> None:
    # The operators that SGLang would replace give a row the same bits in every batch here.
    pass


def _draft_with_intel_amx(_: None, factory: Any, *args: Any, **kwargs: Any) -> None:
    if factory.draft_attn_backend is None and "torch_native" in attention_backends():
        factory.draft_attn_backend = "intel_amx"


def _mask_for_attention_backend(default: Callable[[], TreeMaskMode]) -> TreeMaskMode:
    # SGLang goes by the device: with --attention-backend triton it verifies a wrong tree on a CPU.
    return default() if "torch_native" in attention_backends() else TreeMaskMode.FULL_MASK


def _keep_overlap_in_interpreter(disable: Callable[[Any], None], server_args: Any) -> None:
    # On a CPU the overlap scheduler works except for one Triton kernel, and gains nothing. It stays
    # off, as SGLang sets it, unless Triton's interpreter runs to test GPU code.
    if not triton.knobs.runtime.interpret:
        disable(server_args)


def _pad_linear(
    apply: Callable[..., torch.Tensor],
    method: Any,
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return apply(method, layer, _pad(x), bias)[: x.shape[0]]


def _pad_lm_head(
    compute: Callable[..., torch.Tensor],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    embedding_bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    # out: an output buffer that CUDA graphs use; on a CPU it is not written
    return compute(processor, _pad(hidden_states), lm_head, embedding_bias)[
        : hidden_states.shape[0]
    ]


def _pad(x: torch.Tensor) -> torch.Tensor:
    """x: float[N, K]. Zero rows are appended up to `_MIN_ROWS`."""
    if x.shape[0] >= _MIN_ROWS:
        return x
    padded = x.new_zeros(_MIN_ROWS, x.shape[1])
    padded[: x.shape[0]] = x
    return padded


def _fill(module: ModuleType, name: str, operator: Callable[..., Any]) -> None:
    if getattr(module, name) is not None:
        raise RuntimeError(f"{module.__name__}.{name} has an implementation of its own")
    setattr(module, name, operator)


_ATTENTION = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend"
_SAMPLING = "sglang.srt.speculative.eagle_utils"

TARGETS: dict[str, tuple[Callable[..., Any], HookType]] = {
    _ATTENTION: (TorchAttentionBackend, HookType.REPLACE),
    "sglang.srt.speculative.draft_utils.DraftBackendFactory.__init__": (
        _draft_with_intel_amx,
        HookType.AFTER,
    ),
    "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu": (
        _keep_overlap_in_interpreter,
        HookType.AROUND,
    ),
    "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode": (
        _stay_batch_invariant,
        HookType.REPLACE,
    ),
    f"{_SAMPLING}.default_tree_mask_mode": (_mask_for_attention_backend, HookType.AROUND),
    f"{_SAMPLING}._verify_uses_greedy": (_only_when_all_greedy, HookType.REPLACE),
    f"{_SAMPLING}.eagle_sample": (_remember_min_ps, HookType.AROUND),
    "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply": (
        _pad_linear,
        HookType.AROUND,
    ),
    "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head": (
        _pad_lm_head,
        HookType.AROUND,
    ),
}
