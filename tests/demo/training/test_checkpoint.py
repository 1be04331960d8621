from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from sglang_hvd.demo.training.eagle3 import LlamaForCausalLMEagle3, drafter_config


def test_a_saved_target_is_float32_and_ends_at_eos(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.eos_token_id == 2
    assert loaded.architectures == [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_a_saved_drafter_has_the_names_and_token_maps_that_sglang_expects(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    draft_token_ids = torch.tensor([0, 2, 3, 100, 511])
    of_drafter = drafter_config(config, aux_layer_ids=[0, 1], draft_vocab_size=5)
    LlamaForCausalLMEagle3(of_drafter, draft_token_ids).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    # SGLang's llama_eagle3.py: d2t holds differences.
    assert torch.equal(tensors.pop("d2t") + torch.arange(5), draft_token_ids)
    assert torch.equal(tensors.pop("t2d").nonzero().flatten(), draft_token_ids)
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp = ("gate_proj", "up_proj", "down_proj")
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    assert set(tensors) == {
        *(f"{name}.weight" for name in ("fc", "norm", "lm_head")),
        *(f"midlayer.self_attn.{name}.weight" for name in projections),
        *(f"midlayer.mlp.{name}.weight" for name in mlp),
        *(f"midlayer.{name}.weight" for name in norms),
    }
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (4 * 64, 2 * 128)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.architectures == ["LlamaForCausalLMEagle3"]
    assert loaded.draft_vocab_size == 5
    assert loaded.eagle_config["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert loaded.rope_parameters["rope_theta"] == 1e8
