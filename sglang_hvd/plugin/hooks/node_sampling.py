"""Lets HVD sample at the nodes of its verifications, and account for penalties."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_server_args

from sglang_hvd.plugin.startup.launch import launch_of

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def sample_nodes(
    eagle_sample: Callable[..., Any],
    verify_input: Any,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    grammar_mask: Any = None,
    **kw: Any,
) -> Any:
    """AROUND hook of eagle_sample: HVD's verifications bring their own sampler."""
    sample = getattr(verify_input, "sample", None)
    if sample is None:
        return eagle_sample(verify_input, batch, logits_output, grammar_mask, **kw)
    return sample(verify_input, logits_output, grammar_mask)


def leave_penalties_out(prepare_if_required: Callable[[Any], bool], penalizer: Any) -> bool:
    """AROUND hook of _BatchedPenalizer.prepare_if_required. SGLang's penalties know one token of
    each step, and take an array of the whole batch. HVD works them out for each verification."""
    if launch_of(get_server_args()) is not None:
        return False
    return prepare_if_required(penalizer)
