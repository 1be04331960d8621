"""What streams of a request's figures."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import ResponsesRequest, ResponsesResponse
from sglang.srt.managers import tokenizer_manager
from sglang.srt.plugins import load_plugins

from sglang_hvd.plugin.hooks.openai_replies import NotedParams


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_chunks_that_hold_new_tokens_alone_hold_the_figures_too(offset: int) -> None:
    load_plugins()
    of_tokens = [*range(8)]
    meta_info: dict[str, Any] = {
        "hvd": [{"num_cache_cycles": 3}],
        "of_another": list(of_tokens),
        "output_token_logprobs": list(of_tokens),
    }
    keys = meta_info.keys() - {"output_token_logprobs"}
    tokenizer_manager._slice_streaming_output_meta_info(meta_info, offset, keys)
    assert meta_info["hvd"] == [{"num_cache_cycles": 3}]
    assert meta_info["of_another"] == meta_info["output_token_logprobs"] == of_tokens[offset:]
    tokenizer_manager._slice_streaming_output_meta_info(meta_info, 0)
    assert meta_info["hvd"] == [{"num_cache_cycles": 3}]


def test_a_responses_metadata_has_the_figures_that_its_parameters_noted() -> None:
    load_plugins()
    request = ResponsesRequest(input="1 2 3", metadata={"mine": "1", "hvd": "off"})
    params = NotedParams({"temperature": 0})
    rest: dict[str, Any] = {"model_name": "m", "created_time": 1, "output": [], "usage": None}
    begun = ResponsesResponse.from_request(request, params, status="in_progress", **rest)
    assert begun.metadata == {"mine": "1", "hvd": "off"}
    params.figures.update({1: {"num_cache_cycles": 2}, 0: {"num_cache_cycles": 3}})
    ended = ResponsesResponse.from_request(request, params, status="completed", **rest)
    assert ended.metadata is not None
    assert ended.metadata["mine"] == "1"
    assert [of["num_cache_cycles"] for of in ended.metadata["hvd"]] == [3, 2]
    assert request.metadata == {"mine": "1", "hvd": "off"}
