"""Writes folders that describe models without weights; SGLang fills in random weights.

A model's vocabulary has only the texts' own tokens, renumbered, so that small models stay small.
Tokens are spelled as in the recordings' tokenizer, so the predictor's token classes and the text
stay the same.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from sglang_hvd.traces.trace import Trace

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

# Configurations of the target models. The drafter has one layer of the same width.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "vocab_size": 151936,
        "draft_vocab_size": 32000,
    },
}


@dataclass(frozen=True, slots=True, eq=False)
class OwnVocabulary:
    """The tokens of some texts, numbered from 0.

    token_ids: int32[num_tokens], the tokens' ids in the recordings, ascending.
    """

    token_ids: np.ndarray

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> "OwnVocabulary":
        seen: np.ndarray = np.empty(0, np.int32)
        for trace in traces:
            seen = np.union1d(seen, trace.text_ids)
        return cls(seen)

    def renumbered(self, traces: Sequence[Trace]) -> list[Trace]:
        """The same texts with this vocabulary's token ids."""

        def new(token_ids: np.ndarray) -> np.ndarray:
            return np.searchsorted(self.token_ids, token_ids).astype(np.int32)

        return [
            replace(trace, prompt_ids=new(trace.prompt_ids), output_ids=new(trace.output_ids))
            for trace in traces
        ]

    def write_tokenizer(self, original: Tokenizer, folder: Path) -> None:
        """Writes a tokenizer for SGLang that decodes as the original does. It cannot encode."""
        spelled = [original.id_to_token(int(token_id)) for token_id in self.token_ids]
        tokenizer = Tokenizer(
            models.WordLevel({token: number for number, token in enumerate(spelled)}, spelled[0])
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_models(
    shape: str, folder: Path, *, num_tokens: int, context_length: int
) -> tuple[Path, Path]:
    """Writes the folders of a target and its drafter, and returns them.

    num_tokens: number of tokens in the texts' vocabulary. context_length: in tokens.

    Raises ValueError if the shape's vocabulary is too small.
    """
    settings = {**_COMMON, "max_position_embeddings": context_length, **SHAPES[shape]}
    draft_vocab_size = settings.pop("draft_vocab_size", None)
    vocab_size = settings.setdefault("vocab_size", -(-num_tokens // 64) * 64)
    if num_tokens > vocab_size:
        raise ValueError(
            f"{shape} has {vocab_size} tokens, but the texts have {num_tokens}: give fewer texts"
        )
    num_layers = settings["num_hidden_layers"]
    drafter = {
        **settings,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size or vocab_size,
        "eagle_config": {
            # An early, a middle and a late layer, as in the published drafters.
            "eagle_aux_hidden_state_layer_ids": [
                min(2, num_layers - 4),
                num_layers // 2 - (num_layers < 8),
                max(num_layers - 3, 2),
            ],
            "use_aux_hidden_state": True,
        },
    }
    folders = folder / "target", folder / "drafter"
    for path, config in zip(folders, (settings, drafter), strict=True):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config, indent=1))
    return folders
