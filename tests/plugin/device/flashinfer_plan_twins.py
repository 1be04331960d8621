"""Plans of verifications from the host's lengths: the mask as FlashInfer packs it, by numpy. To be
run in Triton's interpreter, which test_flashinfer_plans.py does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode
from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan

from sglang_hvd.plugin.device.flashinfer_plans import warm_up
from sglang_hvd.plugin.trees.draft_trees import DraftNodes
from sglang_hvd.plugin.trees.layout import lay_out
from tests.plugin.trees.made_up_tries import Tree, tries

WIDTH = 11
MOST_CACHED = 40


@settings(max_examples=60, deadline=None)
@given(
    trees=st.lists(tries(WIDTH - 1), min_size=1, max_size=4),
    num_padding=st.integers(0, 2),
    seed=st.integers(0, 9),
)
def test_the_mask_is_packed_as_flashinfer_packs_it(
    trees: list[Tree], num_padding: int, seed: int
) -> None:
    """A captured batch is padded with requests of one cached token."""
    n = len(trees) + num_padding
    lens = torch.randint(1, MOST_CACHED, (n,), generator=torch.Generator().manual_seed(seed))
    lens[len(trees) :] = 1
    mask = _mask(trees, lens)
    kv_lens = (lens + WIDTH).to(torch.int32)
    kv_indptr = _indptr(kv_lens)
    wrapper, plans = _captured(n)
    fast_prefill_plan(
        wrapper,
        torch.arange(0, (n + 1) * WIDTH, WIDTH, dtype=torch.int32),
        kv_indptr,
        torch.arange(int(kv_lens.sum()), dtype=torch.int32),
        torch.ones(n, dtype=torch.int32),
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim_qk=64,
        page_size=1,
        custom_mask=mask,
        qo_indptr_host=torch.arange(0, (n + 1) * WIDTH, WIDTH, dtype=torch.int32),
        kv_indptr_host=kv_indptr,
        kv_lens_host=kv_lens,
        max_q_len=WIDTH,
        max_kv_len=int(kv_lens.max()),
        uniform_verify_width=WIDTH,
    )
    assert len(plans) == 1
    begin = 0
    for row, kv_len in enumerate(kv_lens.tolist()):
        bits = mask[begin : begin + WIDTH * kv_len].numpy()
        begin += WIDTH * kv_len
        packed = np.packbits(bits, bitorder="little")
        start, end = wrapper._mask_indptr_buf[row : row + 2].tolist()
        assert end - start == len(packed)
        assert wrapper._custom_mask_buf[start:end].tolist() == packed.tolist()


def test_warming_up_packs_nothing_that_is_kept() -> None:
    warm_up(torch.device("cpu"), (1, 2, 7))


def _mask(trees: list[Tree], lens: torch.Tensor) -> torch.Tensor:
    """bool[cells], of a buffer in which an earlier step has left nothing but ones."""
    parents = torch.arange(-1, WIDTH - 1).repeat(len(trees), 1)
    for row, tree in enumerate(trees):
        for node, (parent, _) in enumerate(tree):
            parents[row, 1 + node] = parent
    nodes = DraftNodes(
        token_ids=torch.arange(WIDTH).repeat(len(trees), 1),
        parents=parents,
        num_used=torch.tensor([1 + len(tree) for tree in trees]),
    )
    num_cells = int((WIDTH * (lens + WIDTH)).sum())
    layout = lay_out(
        nodes,
        lens[: len(trees)],
        mode=TreeMaskMode.FULL_MASK,
        num_cells=num_cells,
        buffer=torch.ones(num_cells + 5, dtype=torch.bool),
    )
    assert not layout.mask[:num_cells].all() or WIDTH == 1
    return layout.mask


def _indptr(lens: torch.Tensor) -> torch.Tensor:
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
    indptr[1:] = torch.cumsum(lens, dim=0)
    return indptr


def _captured(n: int) -> tuple[Any, list[tuple[Any, ...]]]:
    """What fast_prefill_plan reads and writes of FlashInfer's wrapper of a captured graph, and the
    arguments with which it asks FlashInfer for plans."""
    plans: list[tuple[Any, ...]] = []

    def plan(*args: Any) -> list[int]:
        plans.append(args)
        return []

    wrapper = SimpleNamespace(
        device=torch.device("cpu"),
        is_cuda_graph_enabled=True,
        _backend="fa2",
        _cached_module=SimpleNamespace(plan=plan),
        _max_total_num_rows=n * WIDTH,
        _qo_indptr_buf=torch.zeros(n + 1, dtype=torch.int32),
        _paged_kv_indptr_buf=torch.zeros(n + 1, dtype=torch.int32),
        _paged_kv_last_page_len_buf=torch.zeros(n, dtype=torch.int32),
        _paged_kv_indices_buf=torch.zeros(n * (MOST_CACHED + WIDTH), dtype=torch.int32),
        _custom_mask_buf=torch.full((n * WIDTH * (MOST_CACHED + WIDTH),), 170, dtype=torch.uint8),
        _mask_indptr_buf=torch.zeros(n + 1, dtype=torch.int32),
        _float_workspace_buffer=None,
        _int_workspace_buffer=None,
        _pin_memory_int_workspace_buffer=None,
    )
    return wrapper, plans
