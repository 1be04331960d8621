"""Writes the demo models as checkpoints that SGLang and transformers load."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_hvd.demo.eagle3 import Eagle3Model
from sglang_hvd.demo.transformer import Architecture, TargetModel


def save_target(
    target: TargetModel, directory: Path, *, eos_token_id: int, pad_token_id: int
) -> None:
    """config.json and model.safetensors of the target, float32."""
    tensors = dict(target.state_dict())
    if target.a.is_tied:
        del tensors["lm_head.weight"]
    config = _config(target.a) | {
        "architectures": ["Qwen3ForCausalLM" if target.a.has_qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if target.a.has_qk_norm else "llama",
        "num_hidden_layers": target.a.num_layers,
        "tie_word_embeddings": target.a.is_tied,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "bos_token_id": None,
    }
    _write(directory, config, tensors)
    generation = {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def save_drafter(
    drafter: Eagle3Model, directory: Path, *, draft_token_ids: Tensor, aux_layer_ids: list[int]
) -> None:
    """config.json and model.safetensors of the drafter.

    `draft_token_ids`: int64 [draft vocabulary], the target's token of every draft token, ascending.
    """
    a = drafter.a
    is_drafted = torch.zeros(a.vocab_size, dtype=torch.bool)
    is_drafted[draft_token_ids] = True
    tensors = dict(drafter.state_dict()) | {
        "d2t": draft_token_ids - torch.arange(len(draft_token_ids)),
        "t2d": is_drafted,
    }
    config = _config(a) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(draft_token_ids),
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": aux_layer_ids,
            "use_aux_hidden_state": True,
        },
    }
    _write(directory, config, tensors)


def _config(a: Architecture) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": a.hidden_size,
        "head_dim": a.head_dim,
        "intermediate_size": a.intermediate_size,
        "max_position_embeddings": a.max_positions,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rope_theta,
        "torch_dtype": "float32",
        "vocab_size": a.vocab_size,
    }


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(
        {name: t.contiguous() for name, t in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
