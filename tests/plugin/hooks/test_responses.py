"""What streams of a request's figures."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers import tokenizer_manager
from sglang.srt.plugins import load_plugins


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
