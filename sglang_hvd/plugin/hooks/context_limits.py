"""Where a request ends at the end of the context, and what its row of KV slots has room for.

SGLang refuses a request that asks for more tokens than the context holds beside the slots of a
verification. One that names no limit, as chat completions need not, it lets go on to the last token
of the context. In either case slots are taken two verifications, or drafts of the model drafter,
ahead; where they end behind the request's row of the table, entries of the next request's are
overwritten. So requests without a limit end as those with the largest one do, and rows hold what is
taken ahead at every page size. (SGLang makes them so long for pages of several tokens.)
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
    """AROUND hook: the columns of the table of KV slots beside those of the context."""
    columns = get_req_to_token_extra_context_len()
    if launch_of(get_context().server_args) is None:
        return columns
    return max(columns, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)


def limit_new_tokens(_result: None, scheduler: Scheduler, req: Req) -> None:
    """AFTER hook of Scheduler.init_req_max_new_tokens, which bounds them by the context alone."""
    if launch_of(scheduler.server_args) is None:
        return
    context_len, num_reserved = scheduler.model_config.context_len, compute_num_reserved_tokens()
    params, num_prompt_tokens = req.sampling_params, len(req.origin_input_ids)
    most = max(context_len - num_reserved - num_prompt_tokens, 0)
    if most == 0 and params.max_new_tokens > 0:
        # A prompt that SGLang cut off to fit, or put together from a session. It refuses longer
        # ones or, with --allow-auto-truncate, asks for no token itself.
        req.set_finish_with_abort(
            f"The prompt has {num_prompt_tokens} tokens, which leaves no room for new ones: of the "
            f"context of {context_len} tokens, {num_reserved} are kept for drafts. Shorten it to "
            f"{context_len - num_reserved - 1} tokens, or serve with narrower verifications "
            "(--hvd-verify-width, --hvd-wide-width)."
        )
    params.max_new_tokens = min(params.max_new_tokens, most)
