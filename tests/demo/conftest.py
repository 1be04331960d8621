"""A model small enough for a test."""

from dataclasses import replace

import pytest

from sglang_hvd.demo.tokenizer import Spelling
from sglang_hvd.demo.transformer import Architecture

LLAMA = Architecture(
    vocab_size=512,
    hidden_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=96,
    max_positions=2048,
    rope_theta=1e8,
    has_qk_norm=False,
    is_tied=True,
)
QWEN3 = replace(LLAMA, has_qk_norm=True, is_tied=False)


@pytest.fixture(params=[LLAMA, QWEN3], ids=["llama", "qwen3"])
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return request.param


@pytest.fixture
def spellings(architecture: Architecture) -> list[Spelling]:
    """Every token a word of its own."""
    return [Spelling(str(token_id), "") for token_id in range(architecture.vocab_size)]
