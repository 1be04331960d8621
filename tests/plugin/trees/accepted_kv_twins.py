"""Moving accepted paths by the kernel, beside torch. To be run in Triton's interpreter, which
test_accepted_kv.py does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_hvd.plugin.hooks.verification import move_to_front
from sglang_hvd.plugin.trees.accepted_kv import is_moved_by_kernel, warm_up
from sglang_hvd.plugin.trees.verify_input import HvdVerifyInput

NUM_SLOTS, WIDTH = 64, 12


def _pool(head_dim: int = 4, heads: int = 2) -> MHATokenToKVPool:
    pool = MHATokenToKVPool(
        size=NUM_SLOTS,
        page_size=1,
        dtype=torch.float16,
        head_num=heads,
        head_dim=head_dim,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    values = torch.Generator().manual_seed(0)
    for buffer in _buffers(pool):
        buffer.copy_(torch.rand(buffer.shape, generator=values))
    return pool


def _buffers(pool: MHATokenToKVPool) -> list[torch.Tensor]:
    return [*pool.k_buffer, *pool.v_buffer]


def _accepted(paths: list[list[int]], depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Paths list the accepted nodes of a request, its root not included."""
    index = torch.full((len(paths), depth), -1, dtype=torch.int32)
    for row, path in enumerate(paths):
        index[row, 0] = row * WIDTH
        for place, node in enumerate(path):
            index[row, 1 + place] = row * WIDTH + node
    return index, torch.tensor([len(path) for path in paths], dtype=torch.int32)


# Nodes stand after their parents, so a path's places rise.
PATHS = st.lists(st.sets(st.integers(1, WIDTH - 1)).map(sorted), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(paths=PATHS, seed=st.integers(0, 3), row=st.sampled_from([(2, 4), (3, 4), (8, 160)]))
def test_it_moves_each_path_to_the_front(
    paths: list[list[int]], seed: int, row: tuple[int, int]
) -> None:
    pool = _pool(heads=row[0], head_dim=row[1])
    assert is_moved_by_kernel(pool)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(seed))
    slots = 1 + slots[: len(paths) * WIDTH]
    accept_index, num_correct = _accepted(paths, WIDTH)
    expected = [buffer.clone() for buffer in _buffers(pool)]
    for request, path in enumerate(paths):
        of_request = slots[request * WIDTH : (request + 1) * WIDTH]
        for buffer in expected:
            buffer[of_request[1 : 1 + len(path)]] = buffer[of_request[path]]
    batch = SimpleNamespace(spec_info=object.__new__(HvdVerifyInput), out_cache_loc=slots)
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    move_to_front(_not_called, batch, accept_index, num_correct, allocator)
    for buffer, wanted in zip(_buffers(pool), expected, strict=True):
        assert torch.equal(buffer, wanted)


def _not_called(*args: object) -> None:
    raise AssertionError("left to SGLang")


def test_what_is_not_hvd_is_left_to_sglang() -> None:
    pool = _pool()
    accept_index, num_correct = _accepted([[3]], WIDTH)
    seen: list[object] = []
    batch = SimpleNamespace(spec_info=None, out_cache_loc=torch.arange(1, 1 + WIDTH))
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    move_to_front(lambda *args: seen.extend(args), batch, accept_index, num_correct, allocator)
    assert seen == [batch, accept_index, num_correct, allocator]


def test_rows_that_are_no_whole_words_are_left_to_sglang() -> None:
    assert not is_moved_by_kernel(_pool(heads=1, head_dim=3))


@pytest.mark.parametrize("field", ["kv_cache_layout", "native_k_scale_buffer"])
def test_other_layouts_are_left_to_sglang(field: str) -> None:
    pool = _pool()
    setattr(pool, field, "other")
    assert not is_moved_by_kernel(pool)


def test_warming_up_moves_nothing() -> None:
    pool = _pool()
    before = [buffer.clone() for buffer in _buffers(pool)]
    warm_up(pool)
    for buffer, wanted in zip(_buffers(pool), before, strict=True):
        assert torch.equal(buffer, wanted)
