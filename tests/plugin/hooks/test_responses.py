"""What streams of a request's figures."""

from __future__ import annotations

from types import SimpleNamespace
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


def test_a_chunk_has_the_latest_figures_alone() -> None:
    load_plugins()
    manager: Any = object.__new__(tokenizer_manager.TokenizerManager)
    state: Any = SimpleNamespace(
        customized_info_accumulated={}, customized_info_reported_keys=set()
    )
    values = [[], [{"cycles": [1]}], [{"cycles": [1, 2]}], [{"num_cache_cycles": 2}]]
    for shown in values:
        meta_info: dict[str, Any] = {}
        customized_info = {"hvd": [shown], "of_another": [[7]]}
        manager.update_request_meta_info(meta_info, state, customized_info, 0, None)
        assert meta_info["hvd"] == shown
    assert meta_info["of_another"] == [7] * len(values)
    of_plain: dict[str, Any] = {}
    manager.update_request_meta_info(of_plain, state, {"of_another": [[7]]}, 0, None)
    assert "hvd" not in of_plain


def test_chunks_that_wait_are_joined_into_one_with_the_latest_figures() -> None:
    load_plugins()
    manager: Any = object.__new__(tokenizer_manager.TokenizerManager)
    chunks = []
    for i, text in enumerate("ab"):
        meta_info = {"hvd": [{"cycles": [i]}], "of_another": [i]}
        chunks.append({"text": text, "output_ids": [i], "meta_info": meta_info})
    joined = manager._coalesce_streaming_chunks(chunks, "rid", {"hvd": 0, "of_another": 0}.keys())
    assert joined["meta_info"] == {"hvd": [{"cycles": [1]}], "of_another": [0, 1]}
    assert (joined["text"], joined["output_ids"]) == ("ab", [0, 1])
