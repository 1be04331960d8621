"""What a response says of a request: `meta_info["hvd"]`, once it has ended, and its logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import get_context

from sglang_hvd.plugin.requests.marks import figures_of
from sglang_hvd.plugin.requests.sampling import check_custom_params
from sglang_hvd.plugin.startup.launch import launch_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

META_INFO_KEY = "hvd"


class HvdOutputStreamer(SchedulerOutputStreamer):
    """Adds the figures of finished requests; SGLang carries them to the response's meta_info."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[list[Any]]]:
        """One list per request in `reqs`: empty until it finishes, then its figures."""
        return {META_INFO_KEY: [_figures(req) for req in reqs]}

    def is_request_level_customized_info_key(self, key: str) -> bool:
        """Our key is one value per request, not one per token."""
        return key == META_INFO_KEY


def stream_hvd_figures(
    get_output_streamer_class: Callable[[Scheduler], type[SchedulerOutputStreamer]],
    scheduler: Scheduler,
) -> type[SchedulerOutputStreamer]:
    """AROUND hook of Scheduler.get_output_streamer_class."""
    if launch_of(scheduler.server_args) is None:
        return get_output_streamer_class(scheduler)
    return HvdOutputStreamer


def keep_hvd_figures(
    slice_streaming_output_meta_info: Callable[..., None],
    meta_info: dict[Any, Any],
    last_output_offset: int,
    customized_info_keys: Iterable[str] | None = None,
) -> None:
    """AROUND hook of the function that cuts the lists in a chunk's meta_info to its new tokens
    under --incremental-streaming-output. Our list has one entry, whatever the tokens, and stays
    whole."""
    keys = None
    if customized_info_keys is not None:
        keys = [key for key in customized_info_keys if key != META_INFO_KEY]
    slice_streaming_output_meta_info(meta_info, last_output_offset, keys)


def check_request(
    create_tokenized_object: Callable[..., Any],
    manager: TokenizerManager,
    obj: Any,
    *args: Any,
    **kw: Any,
) -> Any:
    """AROUND hook of TokenizerManager._create_tokenized_object: what a request asks of HVD in its
    custom_params is checked before the scheduler sees it. SGLang answers a ValueError with 400."""
    params = obj.sampling_params
    if isinstance(params, dict) and launch_of(manager.server_args) is not None:
        check_custom_params(params.get("custom_params"))
    return create_tokenized_object(manager, obj, *args, **kw)


def drop_unasked_logprob(
    _result: None, _processor: Any, _place: int, req: Req, *_args: Any, **_kw: Any
) -> None:
    """AFTER hook of the function that adds the logprob of the token that a prefill gives. Plain
    serving samples none for a request that asks for no token; under speculation SGLang samples one,
    and drops it."""
    if req.sampling_params.max_new_tokens == 0 and launch_of(get_context().server_args) is not None:
        req.logprob.output_token_logprobs_val.clear()
        req.logprob.output_token_logprobs_idx.clear()


def _figures(req: Req) -> list[dict[str, Any]]:
    figures = figures_of(req)
    return [figures] if figures is not None and req.finished() else []
