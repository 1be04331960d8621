"""What goes with every request and reply of an HVD server.

Requests: what would end the server, and what they ask of HVD, is checked on arrival.

Replies: figures, `meta_info["hvd"]`, once the request has ended. Also the stop strings, for the
detokenizer; and no logprob of a token that was not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sglang_hvd.plugin.hooks.text_streams import STOPS_KEY
from sglang_hvd.plugin.requests.bad_requests import (
    apply_processor,
    check_num_samples,
    check_on_arrival,
    errors_of_clients,
    running_requests,
)
from sglang_hvd.plugin.requests.control import check_custom_params
from sglang_hvd.plugin.requests.marks import figures_of
from sglang_hvd.plugin.startup.launch import launch_of, served_launch

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

META_INFO_KEY = "hvd"


class HvdOutputStreamer(SchedulerOutputStreamer):
    """Adds the figures of finished requests; SGLang carries them to the response's meta_info."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[list[Any]]]:
        """Per key, one list per request in `reqs`. Figures: empty until the request finishes."""
        info: dict[str, list[list[Any]]] = {META_INFO_KEY: [_figures(req) for req in reqs]}
        stops = [_stops(req) for req in reqs]
        if any(stops) and not self.server_args.skip_tokenizer_init:
            info[STOPS_KEY] = stops
        return info

    def is_request_level_customized_info_key(self, key: str) -> bool:
        """Our key is one value per request, not one per token."""
        return key == META_INFO_KEY


class HidingOutputStreamer(HvdOutputStreamer):
    """Hides the figures."""

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[list[Any]]]:
        """Stop strings alone."""
        info = super().build_additional_customized_info(reqs)
        del info[META_INFO_KEY]
        return info


def stream_hvd_figures(
    get_output_streamer_class: Callable[[Scheduler], type[SchedulerOutputStreamer]],
    scheduler: Scheduler,
) -> type[SchedulerOutputStreamer]:
    """AROUND hook of Scheduler.get_output_streamer_class."""
    launch = launch_of(scheduler.server_args)
    if launch is None:
        return get_output_streamer_class(scheduler)
    return HvdOutputStreamer if launch.config.report_figures else HidingOutputStreamer


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
    custom_params, and what would end the server, is checked before the scheduler sees it. SGLang
    answers a ValueError with 400."""
    launch = launch_of(manager.server_args)
    if launch is None or not isinstance(obj, GenerateReqInput):
        return create_tokenized_object(manager, obj, *args, **kw)
    params = obj.sampling_params
    if isinstance(params, dict):
        defaults = manager.preferred_sampling_params or {}
        custom_params = {**defaults, **params}.get("custom_params")
        check_custom_params(custom_params, launch.config, is_own="custom_params" in params)
    with errors_of_clients():
        tokenized = create_tokenized_object(manager, obj, *args, **kw)
    is_deterministic = manager.server_args.enable_deterministic_inference
    check_on_arrival(tokenized, manager.model_config, is_deterministic=is_deterministic)
    return tokenized


def check_fields(normalize: Callable[[GenerateReqInput], None], obj: GenerateReqInput) -> None:
    """AROUND hook of GenerateReqInput.normalize_batch_and_arguments, which makes a request of each
    prompt and sample."""
    if served_launch() is None:
        normalize(obj)
        return
    with errors_of_clients():
        check_num_samples(obj)
        normalize(obj)


def apply_processors(
    apply_custom_logit_processor: Callable[..., None],
    logits: torch.Tensor,
    sampling_batch_info: SamplingBatchInfo,
    *args: Any,
) -> None:
    """AROUND hook of SGLang's function that applies custom logit processors to the logits of a
    batch, in place. One that fails ends its request, not the server.

    logits: float[num_requests, vocab_size].
    """
    reqs = running_requests()
    if reqs is None:
        apply_custom_logit_processor(logits, sampling_batch_info, *args)
        return
    for entry in sampling_batch_info.custom_logit_processor.values():
        params = [sampling_batch_info.custom_params[row] for row in entry.rows]
        own = [reqs[row] for row in entry.rows]
        selected = logits.index_select(0, entry.indices)
        found, _ = apply_processor(entry.processor, selected, params, own)
        logits.index_copy_(0, entry.indices, found)


def drop_unasked_logprob(
    _result: None, _processor: Any, _place: int, req: Req, *_args: Any, **_kw: Any
) -> None:
    """AFTER hook of the function that adds the logprob of the token that a prefill gives. Plain
    serving samples none for a request that asks for no token; under speculation SGLang samples one,
    and drops it."""
    if req.sampling_params.max_new_tokens == 0 and served_launch() is not None:
        req.logprob.output_token_logprobs_val.clear()
        req.logprob.output_token_logprobs_idx.clear()


def _figures(req: Req) -> list[dict[str, Any]]:
    figures = figures_of(req)
    return [figures] if figures is not None and req.finished() else []


def _stops(req: Req) -> list[str]:
    # The detokenizer also cuts a reply at the text of a pattern that ended it.
    return [*req.sampling_params.stop_strs, *req.sampling_params.stop_regex_strs]
