"""Refuses what the server's device does not have. SGLang finds out when it has begun to load, and
ends with a traceback."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
from sglang.srt.utils.common import get_cpu_ids_by_node
from triton import knobs

# Which cores each rank takes on a CPU; without it each rank takes a NUMA node.
_CORES_ENV = "SGLANG_CPU_OMP_THREADS_BIND"


def check_device(cfg: Any, backends: Collection[str]) -> None:
    """Raises ValueError for a device of no kind, and for settings that a CPU cannot have.

    cfg: SGLang's resolved arguments.
    backends: the target model's attention backends.
    """
    try:
        device = torch.device(cfg.device)
    except RuntimeError:
        raise ValueError(f"--device {cfg.device}: there is no such kind of device") from None
    if device.type == "cpu":
        _check_cpu(cfg, backends)


def check_memory_and_gpu(cfg: Any) -> None:
    """Raises ValueError for a GPU that is not there, and where SGLang leaves no memory.

    cfg: SGLang's resolved arguments.
    """
    if cfg.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {cfg.device}: torch finds no GPU; serve on a machine with one")
    share = cfg.mem_fraction_static
    if share is not None and share <= 0:
        raise ValueError(
            f"SGLang leaves a share of {share} of the memory to weights and KV cache: give "
            "--mem-fraction-static, or lower --chunked-prefill-size"
        )


def _check_cpu(cfg: Any, backends: Collection[str]) -> None:
    of_drafter = cfg.speculative_draft_attention_backend
    runs = {"torch_native", "intel_amx", *(["triton"] if knobs.runtime.interpret else [])}
    for backend in sorted({*backends, *([of_drafter] if of_drafter else [])} - runs):
        raise ValueError(
            f"attention backend {backend} does not run on a CPU: use torch_native, or name none"
        )
    refusals = {
        "--enable-torch-compile": cfg.enable_torch_compile,
        "--enable-hierarchical-cache": cfg.enable_hierarchical_cache,
        "--enable-lora": cfg.enable_lora or cfg.lora_paths,
        "--speculative-draft-window-size": cfg.speculative_draft_window_size,
        "--kv-cache-dtype fp8_e5m2": "fp8_e5m2"
        in (cfg.kv_cache_dtype, cfg.speculative_draft_kv_cache_dtype),
    }
    for flag in (flag for flag, is_given in refusals.items() if is_given):
        raise ValueError(f"a server on a CPU cannot have {flag}: drop it")
    num_ranks, num_nodes = cfg.tp_size * cfg.dp_size, len(get_cpu_ids_by_node())
    if num_ranks > num_nodes and os.environ.get(_CORES_ENV, "all") == "all":
        raise ValueError(
            f"{num_ranks} ranks need as many NUMA nodes on a CPU, and there are {num_nodes}: name "
            f"the cores of each rank, as in {_CORES_ENV}=0|1"
        )
