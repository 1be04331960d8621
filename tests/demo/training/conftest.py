"""A model small enough for a test."""

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from sglang_hvd.demo.training.demo_tokenizer import Spelling

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e8},
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


@pytest.fixture(params=["llama", "qwen3"])
def config(request: pytest.FixtureRequest) -> PreTrainedConfig:
    if request.param == "llama":
        return LlamaConfig(**SIZES, tie_word_embeddings=True)
    return Qwen3Config(**SIZES, tie_word_embeddings=False)


@pytest.fixture
def spellings(config: PreTrainedConfig) -> list[Spelling]:
    """Every token a word of its own."""
    return [Spelling(str(token_id), "") for token_id in range(config.vocab_size)]
