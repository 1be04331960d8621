"""What goes with every request and reply of an HVD server.

Requests: what would end the server, and what they ask of HVD, is checked on arrival.

Replies: figures, once the request has ended. `/generate` has them in `meta_info["hvd"]`. The OpenAI
APIs have them where SGLang has a place: in `metadata["hvd"]` of a response, and in `sglext["hvd"]`
of a stream that has an sglext. Also the stop strings, for the detokenizer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import HTTPException
from sglang.srt.entrypoints.openai.protocol import ChatCompletionResponse, CompletionResponse
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import get_context

from sglang_hvd.plugin.hooks.text_streams import STOPS_KEY
from sglang_hvd.plugin.requests.bad_requests import (
    apply_processor,
    check_on_arrival,
    one_line,
    running_requests,
)
from sglang_hvd.plugin.requests.control import check_custom_params
from sglang_hvd.plugin.requests.marks import figures_of
from sglang_hvd.plugin.startup.launch import launch_of

if TYPE_CHECKING:
    import torch
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest, ResponsesResponse
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

META_INFO_KEY = "hvd"
_DATA = "data: "


class HvdOutputStreamer(SchedulerOutputStreamer):
    """Adds the figures of finished requests; SGLang carries them to the response's meta_info."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[list[Any]]]:
        """Per key, one list per request in `reqs`. Figures: empty until the request finishes."""
        info: dict[str, list[list[Any]]] = {}
        launch = launch_of(self.server_args)
        if launch is not None and launch.config.report_figures:
            info[META_INFO_KEY] = [_figures(req) for req in reqs]
        stops = [_stops(req) for req in reqs]
        if any(stops) and not self.server_args.skip_tokenizer_init:
            info[STOPS_KEY] = stops
        return info

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
    try:
        tokenized = create_tokenized_object(manager, obj, *args, **kw)
    except (ValueError, HTTPException):
        raise
    except Exception as error:  # what SGLang raises for a value that it does not check
        raise ValueError(f"a value of the request is wrong: {one_line(error)}") from error
    check_on_arrival(tokenized, manager.model_config.vocab_size)
    return tokenized


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
        logits.index_copy_(
            0, entry.indices, apply_processor(entry.processor, selected, params, own)
        )


class NotedParams(dict[str, Any]):
    """Sampling parameters of a request, which SGLang's APIs hand on as one object. They note the
    figures of its outputs, by their numbers, for a reply in whose making there is no meta_info."""

    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__(params)
        self.figures: dict[int, Any] = {}

    def listed(self) -> list[Any]:
        """The figures so far, in the order of the outputs."""
        return [self.figures[number] for number in sorted(self.figures)]


def note_figures(
    generate_request: Callable[..., AsyncGenerator[Any, None]],
    manager: TokenizerManager,
    obj: Any,
    *args: Any,
    **kw: Any,
) -> AsyncGenerator[Any, None]:
    """AROUND hook of TokenizerManager.generate_request."""
    params, outputs = obj.sampling_params, generate_request(manager, obj, *args, **kw)
    return _noting(outputs, params) if isinstance(params, NotedParams) else outputs


async def _noting(
    outputs: AsyncGenerator[Any, None], params: NotedParams
) -> AsyncGenerator[Any, None]:
    async with aclosing(outputs):
        async for output in outputs:
            for place, each in enumerate(output if isinstance(output, list) else [output]):
                for figures in each["meta_info"].get(META_INFO_KEY, ()):
                    params.figures[each.get("index", place)] = figures
            yield output


def add_to_metadata(
    response: Any, _serving: Any, _request: Any, outputs: list[dict[str, Any]], *_: Any
) -> None:
    """AFTER hook of the functions that build chat completions and completions: adds the figures of
    all choices to the response's `metadata`."""
    found = [each["meta_info"].get(META_INFO_KEY) for each in outputs]
    if any(found) and isinstance(response, (ChatCompletionResponse, CompletionResponse)):
        figures = [of[0] if of else None for of in found]
        response.metadata = {**(response.metadata or {}), META_INFO_KEY: figures}


def stream_figures(
    generate_stream: Callable[..., AsyncGenerator[str, None]],
    serving: Any,
    adapted_request: Any,
    request: Any,
    raw_request: Any,
) -> AsyncGenerator[str, None]:
    """AROUND hook of the functions that stream chat completions and completions: the `sglext` of a
    stream, its last chunk with data, gets the figures. SGLang sends one to a request with
    return_spec_tokens_details."""
    if not request.return_spec_tokens_details:
        return generate_stream(serving, adapted_request, request, raw_request)
    params = adapted_request.sampling_params = NotedParams(adapted_request.sampling_params)
    return _with_figures(generate_stream(serving, adapted_request, request, raw_request), params)


async def _with_figures(
    events: AsyncGenerator[str, None], params: NotedParams
) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for event in events:
            if not params.figures or not event.startswith(_DATA) or '"sglext":' not in event:
                yield event
                continue
            payload = orjson.loads(event.removeprefix(_DATA))
            if "sglext" in payload:  # and not a text that names it
                payload["sglext"][META_INFO_KEY] = params.listed()
            yield f"{_DATA}{orjson.dumps(payload).decode()}\n\n"


def ask_in_metadata(
    params: dict[str, Any], request: ResponsesRequest, *_: Any, **_kw: Any
) -> dict[str, Any]:
    """AFTER hook of ResponsesRequest.to_sampling_params. /v1/responses has no custom_params: what a
    request asks of HVD is in its metadata, whose values may be text.

    Raises ValueError, in one line, for what the server cannot serve.
    """
    launch = launch_of(get_context().server_args)
    if launch is None:
        return params
    asked = (request.metadata or {}).get(META_INFO_KEY)
    if isinstance(asked, str) and asked.startswith("{"):
        try:
            asked = orjson.loads(asked)
        except orjson.JSONDecodeError as error:
            raise ValueError(f'metadata: "hvd": {error}') from None
    if asked is not None:
        custom_params = {**params.get("custom_params", {}), META_INFO_KEY: asked}
        check_custom_params(custom_params, launch.config)
        params["custom_params"] = custom_params
    return NotedParams(params)


def report_in_metadata(
    response: ResponsesResponse,
    _cls: type,
    _request: ResponsesRequest,
    sampling_params: dict[str, Any],
    **_: Any,
) -> None:
    """AFTER hook of ResponsesResponse.from_request: adds the figures to its metadata."""
    if isinstance(sampling_params, NotedParams) and sampling_params.figures:
        metadata = response.metadata or {}
        response.metadata = {**metadata, META_INFO_KEY: sampling_params.listed()}


def _figures(req: Req) -> list[dict[str, Any]]:
    figures = figures_of(req)
    return [figures] if figures is not None and req.finished() else []


def _stops(req: Req) -> list[str]:
    # The detokenizer also cuts a reply at the text of a pattern that ended it.
    return [*req.sampling_params.stop_strs, *req.sampling_params.stop_regex_strs]
