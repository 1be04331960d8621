"""Limits requests at the end of the context, and makes room for the KV slots that are taken ahead.

Slots are taken ahead for two verifications, or for the model drafter's drafts. SGLang refuses a
request whose limit exceeds the context minus the slots of a verification, but lets a request
without a limit, such as most chat completions, run to the last token of the context. Slots taken
ahead would then exceed the request's row of the slot table and overwrite the next request's row. So
a request without a limit gets the largest allowed one, and rows have room for the slots ahead at
every page size. (SGLang itself makes that room only for pages of several tokens.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.managers.utils import compute_num_reserved_tokens
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_page_size,
    get_alloc_reserve_per_decode,
)
from sglang.srt.runtime_context import get_context

from sglang_hvd.plugin.startup.launch import launch_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler


def hold_slots_ahead(get_req_to_token_extra_context_len: Callable[[], int]) -> int:
    """AROUND hook: the extra columns of the slot table, in addition to those of the context."""
    columns = get_req_to_token_extra_context_len()
    if launch_of(get_context().server_args) is None:
        return columns
    return max(columns, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)


def limit_new_tokens(_result: None, scheduler: Scheduler, req: Req) -> None:
    """AFTER hook of Scheduler.init_req_max_new_tokens, which considers only the context length."""
    if launch_of(scheduler.server_args) is None:
        return
    context_len, num_reserved = scheduler.model_config.context_len, compute_num_reserved_tokens()
    params, num_prompt_tokens = req.sampling_params, len(req.origin_input_ids)
    max_tokens = max(context_len - num_reserved - num_prompt_tokens, 0)
    if max_tokens == 0 and params.max_new_tokens > 0:
        # SGLang truncated this prompt to fit, or assembled it from a session. It refuses other
        # prompts of this length or, with --allow-auto-truncate, asks for no token itself.
        req.set_finish_with_abort(
            f"The prompt has {num_prompt_tokens} tokens, which leaves no room for new ones: of the "
            f"context of {context_len} tokens, {num_reserved} are reserved for drafts. Shorten it "
            f"to {context_len - num_reserved - 1} tokens, or serve with narrower verifications "
            "(--hvd-verify-width, --hvd-set wide_width)."
        )
    params.max_new_tokens = min(params.max_new_tokens, max_tokens)
