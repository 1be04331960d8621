"""The kernels of the verify tree: as the native core in Triton's interpreter, and compiled for the
GPUs."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_hvd.plugin.trees import layout_kernels
from tests.e2e.forked_server import Nursery
from tests.triton_interpreter import assert_passes_interpreted

H100, B200 = 90, 100  # compute capability; an H200 has that of an H100


def test_the_kernels_equal_the_native_core(nursery: Nursery, tmp_path: Path) -> None:
    assert_passes_interpreted(Path(__file__).with_name("layout_kernel_twins.py"), nursery, tmp_path)


def _compiled(kernel: Any, capability: int, num_warps: int, **constants: Any) -> Any:
    """For all arguments as they are passed: pointers to int64, but masks, and integers."""
    scalars = {"w", "num_tree_nodes", "num_groups", "topk"}
    signature = {}
    for name in inspect.signature(kernel.fn).parameters:
        if name in constants:
            signature[name] = "constexpr"
        elif name in scalars or name.endswith("_stride"):
            signature[name] = "i32"
        else:
            signature[name] = "*u8" if name in ("mask", "is_model_node") else "*i64"
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps}
    )


@pytest.mark.parametrize("capability", [H100, B200])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("is_full_mask", [False, True])
def test_the_layout_compiles(capability: int, block: int, is_full_mask: bool) -> None:
    compiled = _compiled(
        *(layout_kernels._lay_out_kernel, capability, layout_kernels._layout_warps(block)),
        IS_FULL_MASK=is_full_mask,
        BLOCK=block,
    )
    assert compiled.asm["cubin"]


@pytest.mark.parametrize("capability", [H100, B200])
@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("has_ranks", [False, True])
@pytest.mark.parametrize(("block", "tree_block"), [(32, 32), (128, 64)])
def test_the_merge_compiles(
    capability: int, has_rows: bool, has_ranks: bool, block: int, tree_block: int
) -> None:
    compiled = _compiled(
        *(layout_kernels._merge_kernel, capability, 1),
        HAS_ROWS=has_rows,
        HAS_RANKS=has_ranks,
        BLOCK=block,
        TREE_BLOCK=tree_block,
    )
    assert compiled.asm["cubin"]
