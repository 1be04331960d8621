"""Figures in the replies of the OpenAI APIs, where SGLang has a place: in `metadata["hvd"]` of a
response, and in `sglext["hvd"]` of a stream that has an sglext. Also how `/v1/responses` asks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson
from sglang.srt.entrypoints.openai.protocol import ChatCompletionResponse, CompletionResponse

from sglang_hvd.plugin.hooks.responses import META_INFO_KEY
from sglang_hvd.plugin.requests.control import check_custom_params
from sglang_hvd.plugin.startup.launch import served_launch

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest, ResponsesResponse
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_DATA = "data: "


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
                event = f"{_DATA}{orjson.dumps(payload).decode()}\n\n"
            yield event


def ask_in_metadata(
    params: dict[str, Any], request: ResponsesRequest, *_: Any, **_kw: Any
) -> dict[str, Any]:
    """AFTER hook of ResponsesRequest.to_sampling_params. /v1/responses has no custom_params: what a
    request asks of HVD is in its metadata, whose values may be text.

    Raises ValueError, in one line, for what the server cannot serve.
    """
    launch = served_launch()
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
