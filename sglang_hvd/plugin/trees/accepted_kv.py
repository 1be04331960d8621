"""Moves the KV of accepted paths to the front of their requests' slots.

SGLang's kernel copies every slot of the batch, also unmoved and rejected ones, in launches of up to
256 slots. It compiles a variant for each power of two when it first needs it while serving. This
kernel moves only tokens that change place, and is compiled before serving.

A thread walks along one path from its first token and moves the same bytes of each token. A token
never stands before its place in the path, so a thread has already read what it overwrites.
(SGLang's kernel relies on the layout of Triton 3.7.1, in which a thread has the same bytes of all
slots; Triton does not guarantee that.)
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.utils.async_probe import maybe_detect_oob

from sglang_hvd.plugin.trees.layout_kernels import runs_kernels

_WORD = 8  # bytes
_BLOCK = 256  # words of each token that a program moves


def is_moved_by_kernel(pool: Any) -> bool:
    """Whether the pool's tokens are rows of whole words, one for each slot and buffer, on a GPU."""
    return _row_words(pool) is not None


def warm_up(pool: Any) -> None:
    """Compiles the kernel before a server needs it."""
    if is_moved_by_kernel(pool):
        none = torch.zeros((1, 1), dtype=torch.int32, device=pool.data_ptrs.device)
        move_paths(pool, none[0].to(torch.int64), none, none[0])


def move_paths(
    pool: Any, slots: torch.Tensor, accept_index: torch.Tensor, num_correct: torch.Tensor
) -> None:
    """Move the accepted tokens of every request, in all buffers of the pool.

    Args:
        slots: int64[n * w]; slots of the KV cache, those of a request's nodes side by side.
        accept_index: int32[n, depth]; see verify_input.num_accepted_of_model.
        num_correct: int32[n]; accepted nodes of each request, its root not counted.
    """
    n, words = len(num_correct), _row_words(pool)
    # SGLang's checks, which are off by default.
    maybe_detect_oob(accept_index, -1, len(slots), "HVD accept_index")
    maybe_detect_oob(slots, 0, pool.size + pool.page_size, "HVD slots")
    assert words is not None, "is_moved_by_kernel refuses this pool"
    _move_kernel[(n, len(pool.data_ptrs), triton.cdiv(words, _BLOCK))](
        pool.data_ptrs,
        pool.data_strides,
        slots,
        accept_index,
        num_correct,
        accept_index.stride(0),
        len(slots) // n,
        BLOCK=_BLOCK,
    )


# By pool: reading all buffers takes about 100 us, and their rows do not change.
_known_row_words: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()


def _row_words(pool: Any) -> int | None:
    """Words in the longest row of the pool's buffers; None for a pool that SGLang moves."""
    if pool not in _known_row_words:
        _known_row_words[pool] = _look_at_rows(pool)
    return _known_row_words[pool]


def _look_at_rows(pool: Any) -> int | None:
    if not (
        type(pool) is MHATokenToKVPool
        and runs_kernels(pool.data_ptrs.device)
        and pool.layer_num > 0
        and pool.kv_cache_layout == "nhd"
        and pool.native_k_scale_buffer is None
    ):
        return None
    buffers: list[torch.Tensor] = pool._slot_move_pointer_buffers()  # those of pool.data_ptrs
    row_bytes = [buffer.stride(0) * buffer.dtype.itemsize for buffer in buffers]
    starts = [buffer.data_ptr() for buffer in buffers]
    if any(num % _WORD for num in (*row_bytes, *starts)):
        return None
    return max(row_bytes) // _WORD


# Triton must not specialize on these: a server would compile variants while it serves.
@triton.jit(
    do_not_specialize=["index_stride", "w"],
    do_not_specialize_on_alignment=[
        *("data_ptrs", "data_strides", "slots", "accept_index", "num_correct"),
    ],
)
def _move_kernel(  # type: ignore[no-untyped-def]
    data_ptrs,
    data_strides,
    slots,
    accept_index,
    num_correct,
    index_stride,
    w,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    words = tl.load(data_strides + tl.program_id(1)) // 8
    rows = tl.cast(tl.load(data_ptrs + tl.program_id(1)), tl.pointer_type(tl.int64))
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first = request * w
    for k in range(1, tl.load(num_correct + request) + 1):
        node = tl.load(accept_index + request * index_stride + k).to(tl.int64)
        if node != first + k:
            source = tl.load(slots + node).to(tl.int64)
            target = tl.load(slots + first + k).to(tl.int64)
            values = tl.load(rows + source * words + word, mask=word < words)
            tl.store(rows + target * words + word, values, mask=word < words)
