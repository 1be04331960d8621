"""The `sgl_kernel` names that SGLang 0.5.23 imports on a CPU, in plain torch.

`convert_weight_packed` is deliberately missing: SGLang takes its absence to mean "no AMX" and runs
norms, rope and MLP in torch instead of asking for operators that are not here.
"""

import torch

if torch.cuda.is_available():
    raise ImportError(
        "sgl_kernel: the CPU stand-in (sgl-kernel-cpu) was imported on a machine with a GPU: "
        "run `pip uninstall sgl-kernel-cpu` and install SGLang's own kernels, "
        "or hide the GPU with CUDA_VISIBLE_DEVICES="
    )

from sgl_kernel.attention import decode_attention_cpu, extend_attention_cpu
from sgl_kernel.kv_cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from sgl_kernel.sampling import murmur_hash32_cpu, tree_speculative_sampling_target_only
from sgl_kernel.tree import (
    build_tree_kernel_efficient_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "murmur_hash32_cpu",
    "rotate_input_ids_cpu",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy_cpu",
]
