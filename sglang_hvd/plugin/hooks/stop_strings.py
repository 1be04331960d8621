"""Makes stop strings and patterns end a request where plain serving ends it, whatever was drafted.

Plain serving searches the last k + 1 tokens, where k is the token length of the longest stop
string. Under speculation SGLang also searches the whole cycle. So it finds stop strings that plain
serving misses because the text spells them in more tokens, and stop strings after an end token in
the cycle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_STR

from sglang_hvd.plugin.requests.marks import is_held

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def end_as_plain_serving(
    update: Callable[[Req, int], None], req: Req, new_accepted_len: int = 1
) -> None:
    """AROUND hook of Req.update_finish_state."""
    stops = req.sampling_params
    if (
        new_accepted_len <= 1
        or not (stops.stop_strs or stops.stop_regex_strs)
        or req.finished()
        or req.grammar is not None  # the grammar has already consumed the whole cycle
        or not is_held(req)
    ):
        update(req, new_accepted_len)
        return
    if not stops.stop_regex_strs:
        # A stop string that is not in the whole cycle is in no part of it: then no token needs to
        # be looked at alone, which costs decoding. If it comes after max_new_tokens, the reason is
        # the length.
        update(req, new_accepted_len)
        reason = req.finished_reason
        is_stop = isinstance(reason, FINISH_MATCHED_STR) and reason.matched in stops.stop_strs
        if not is_stop and not isinstance(reason, FINISH_LENGTH):
            return
        req.finished_reason = req.finished_len = None
    output_ids = req.output_ids
    accepted = output_ids[-new_accepted_len:]
    del output_ids[-new_accepted_len:]
    while accepted and not req.finished():
        output_ids.append(accepted.pop(0))
        update(req, 1)
    output_ids.extend(accepted)
