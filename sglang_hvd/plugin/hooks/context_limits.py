"""Lets requests use the whole context, as in plain serving.

A step takes KV slots ahead: for two verifications, or for the model drafter's drafts. A request
that ends with the last token of the context has taken slots after that token, and drafted there.
SGLang keeps the end of the context free for one verification, so that it refuses prompts that plain
serving takes. But it lets a request without a limit, such as most chat completions, run into that
room: its slots can exceed the request's row of the slot table and overwrite the next request's row.
Here nothing of the context is kept free. Instead, whatever has a place for each token of a context
has some for the slots ahead too: rows at every page size, attention backends, position embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_hvd.plugin.device.context_room import num_slots_after_context, room_after_context
from sglang_hvd.plugin.startup.launch import launch_of, served_launch

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def reserve_nothing(compute_num_reserved_tokens: Callable[[], int]) -> int:
    """AROUND hook: the tokens at the end of the context that no request may ask for."""
    if served_launch() is None:
        return compute_num_reserved_tokens()
    return 0


def hold_slots_ahead(get_req_to_token_extra_context_len: Callable[[], int]) -> int:
    """AROUND hook: the extra columns of the slot table, in addition to those of the context."""
    columns = get_req_to_token_extra_context_len()
    if served_launch() is None:
        return columns
    return max(columns, num_slots_after_context())


def hold_positions_ahead(
    init_attention_backends: Callable[[ModelRunner], None], runner: ModelRunner
) -> None:
    """AROUND hook of ModelRunner.init_attention_backends, which runs before graphs are captured.
    SGLang has made room for some positions, but not for those of any width."""
    if launch_of(runner.server_args) is None:
        init_attention_backends(runner)
        return
    with room_after_context(runner):
        last = runner.model_config.context_len - 1
        for module in runner.model.modules():
            # Not every embedding has a table; SGLang asks for these two names too.
            if hasattr(module, "_ensure_cos_sin_cache_length") and hasattr(module, "cos_sin_cache"):
                module._ensure_cos_sin_cache_length(last)
        init_attention_backends(runner)
