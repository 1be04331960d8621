"""Room after the end of the context, for the slots that steps take ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def num_slots_after_context() -> int:
    """KV slots after the last token of the context that a request can hold: those of two steps, and
    the rest of a page."""
    return get_alloc_reserve_per_decode() + get_alloc_page_size() - 1


@contextmanager
def room_after_context(runner: ModelRunner) -> Iterator[None]:
    """Attention backends that are made inside have room for the slots after the context too. They
    read the length of a context from the model's config when they are made."""
    config = runner.model_config
    context_len = config.context_len
    config.context_len = context_len + num_slots_after_context()
    try:
        yield
    finally:
        config.context_len = context_len
