"""The kernel that moves accepted paths: as torch in Triton's interpreter, and compiled for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_hvd.plugin.trees import accepted_kv
from tests.e2e.forked_server import Nursery
from tests.triton_interpreter import assert_passes_interpreted


def test_the_kernel_equals_torch(nursery: Nursery, tmp_path: Path) -> None:
    assert_passes_interpreted(Path(__file__).with_name("accepted_kv_twins.py"), nursery, tmp_path)


@pytest.mark.parametrize("capability", [90, 100])  # H100 and H200, B200
def test_the_kernel_compiles(capability: int) -> None:
    signature = {
        **{"data_ptrs": "*u64", "data_strides": "*i64", "slots": "*i64"},
        **{"accept_index": "*i32", "num_correct": "*i32", "index_stride": "i32", "w": "i32"},
        "BLOCK": "constexpr",
    }
    constants = {"BLOCK": accepted_kv._BLOCK}
    source = ASTSource(accepted_kv._move_kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]


def test_a_pool_without_kernels_is_left_to_sglang() -> None:
    pool = MHATokenToKVPool(
        size=8,
        page_size=1,
        dtype=torch.float16,
        head_num=2,
        head_dim=4,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    assert not accepted_kv.is_moved_by_kernel(pool)
