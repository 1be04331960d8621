"""What the demo models are and how long they train, without importing torch or transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_SHARED = {
    "vocab_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-5,
}
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "tie_word_embeddings": True,
}
_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 192,
    "tie_word_embeddings": False,
}


# What each part of a build draws its sessions and first weights from. The target and the drafter
# also use the seeds after theirs.
SEEDS = MappingProxyType(
    {"tokenizer": 0, "target": 1000, "polish": 1500, "drafter": 2000}
    | {"replies": 3000, "references": 4000}
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to build and how long to train.

    sizes: the target's model type and sizes, named as in a config of transformers.
    tokenizer_sessions, measured_sessions: sessions of each family that the tokenizer learns from,
        and on which the quality is measured.

    Counts of tokens include prompts. The target first trains on `target_tokens` of all families
    alike, then on `polish_tokens` that are mostly of the families with the most mistakes. The
    predictor learns from the trained target's replies to the sessions of `predictor_tokens` and
    from the reference replies in those of `reference_tokens`. Reference replies resemble the
    target's and need no model.
    """

    sizes: Mapping[str, Any]
    target_tokens: int
    polish_tokens: int
    drafter_tokens: int
    predictor_tokens: int
    reference_tokens: int
    draft_vocab_size: int = 1024
    drafting_steps: int = 3
    target_learning_rate: float = 4e-3
    drafter_learning_rate: float = 2e-3
    tokens_per_batch: int = 1024
    tokenizer_sessions: int = 1000
    measured_sessions: int = 100


# The Qwen3-shaped models are for tests of that architecture. They train little: what they know is
# to copy, with which training begins.
RECIPES = MappingProxyType(
    {
        "llama": Recipe(_SHARED | _LLAMA, 5_500_000, 700_000, 500_000, 20_000, 300_000),
        "qwen3": Recipe(_SHARED | _QWEN3, 100_000, 10_000, 40_000, 5_000, 20_000),
    }
)
