"""What a launch needs of memory, from configs alone, and how much there is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig

from sglang_hvd.allocation import MAX_WIDE_REQUESTS
from sglang_hvd.plugin.startup.launch import HvdLaunch
from sglang_hvd.plugin.startup.verify_widths import slots_ahead

# Bits of a value by --kv-cache-dtype, scales not counted; auto is the model's own type.
_KV_BITS = {
    **{"bf16": 16, "bfloat16": 16, "fp8_e5m2": 8, "fp8_e4m3": 8, "mxfp8": 8},
    **{"nvfp4": 4, "fp4_mx_block16": 4},
}


def kv_bytes(model: ModelConfig, cfg: Any) -> int:
    """Bytes of a KV slot of the model on each rank, estimated from its config."""
    hybrid = mambaish_config(model)
    num_layers = model.num_hidden_layers if hybrid is None else len(hybrid.full_attention_layer_ids)
    num_heads = model.get_num_kv_heads(cfg.tp_size)
    if model.attention_arch == AttentionArch.MLA:
        num_values = model.kv_lora_rank + model.qk_rope_head_dim
    else:
        num_values = num_heads * (model.head_dim + model.v_head_dim)
    bits = _KV_BITS.get(cfg.kv_cache_dtype, 8 * model.dtype.itemsize)
    return num_layers * num_values * bits // 8


def graph_bytes(launch: HvdLaunch, cfg: Any) -> int:
    """Bytes of FlashInfer's buffers for graphs of all widths, of both models; 0 for other backends.

    For each token that a graph verifies and each of the context and of the slots ahead, an index of
    four bytes and a mask of one (init_cuda_graph_state in SGLang's flashinfer_backend.py).
    """
    graphs = cfg.cuda_graph_config.decode
    if "flashinfer" not in launch.attention.backends or graphs.backend == "disabled":
        return 0
    num_nodes = sum(
        width * (MAX_WIDE_REQUESTS if width > launch.widths.base else graphs.max_bs)
        for width in launch.widths.values
    )
    longest = int(model_config_of(cfg).context_len) + slots_ahead(launch.widths.widest, cfg)
    return 2 * 5 * num_nodes * longest


def are_loaded_as_stored(cfg: Any, models: Sequence[ModelConfig]) -> bool:
    """Whether weights take at least as much memory as their files, and all of it on the GPU."""
    return (
        cfg.quantization is None
        and cfg.speculative_draft_model_quantization in (None, "unquant")
        and cfg.cpu_offload_gb == 0
        and cfg.offload_group_size <= 0
        and all(
            isinstance(stored, torch.dtype) and stored.itemsize <= model.dtype.itemsize
            for model in models
            for stored in [model.hf_text_config.dtype]
        )
    )


def memory_bytes(cfg: Any) -> int | None:
    """Memory of the machine, or of its smallest GPU; None for a GPU that is not there."""
    if cfg.device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not cfg.device.startswith("cuda") or not torch.cuda.is_available():
        return None
    gpus = range(cfg.base_gpu_id, torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus), default=None)
