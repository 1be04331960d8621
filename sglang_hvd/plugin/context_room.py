"""Requests without a limit of their own end where a verification still has room in the context.

SGLang refuses a request that asks for more tokens than the context holds beside the slots of a
verification. One that names no limit, as chat completions need not, it lets go on to the last token
of the context; its KV window, two verifications ahead, then ends behind the request's row of the
table of KV slots, and with it entries of the next request's are overwritten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.utils import compute_num_reserved_tokens

from sglang_hvd.plugin.launch import launch_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler


def limit_new_tokens(_result: None, scheduler: Scheduler, req: Req) -> None:
    """AFTER hook of Scheduler.init_req_max_new_tokens, which bounds them by the context alone."""
    if launch_of(scheduler.server_args) is None:
        return
    room = scheduler.model_config.context_len - compute_num_reserved_tokens()
    most = max(room - len(req.origin_input_ids), 0)
    req.sampling_params.max_new_tokens = min(req.sampling_params.max_new_tokens, most)
