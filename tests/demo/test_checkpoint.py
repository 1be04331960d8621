from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_hvd.demo.checkpoint import save_drafter, save_target
from sglang_hvd.demo.eagle3 import Eagle3Model
from sglang_hvd.demo.transformer import Architecture, TargetModel


def random_target(architecture: Architecture) -> TargetModel:
    torch.manual_seed(0)
    target = TargetModel(architecture)
    for parameter in target.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    return target.requires_grad_(False)


def test_exported_target_has_the_same_logits_in_transformers(
    architecture: Architecture, tmp_path: Path
) -> None:
    target = random_target(architecture)
    save_target(target, tmp_path, eos_token_id=2, pad_token_id=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    token_ids = torch.randint(0, architecture.vocab_size, (2, 700))
    with torch.no_grad():
        expected = loaded(token_ids).logits
    torch.testing.assert_close(target.lm_head(target(token_ids)[-1]), expected)


def test_exported_target_is_float32_and_ends_at_eos(
    architecture: Architecture, tmp_path: Path
) -> None:
    save_target(random_target(architecture), tmp_path, eos_token_id=2, pad_token_id=0)
    assert AutoConfig.from_pretrained(tmp_path).eos_token_id == 2
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_draft_tokens_and_target_tokens_map_to_each_other(
    architecture: Architecture, tmp_path: Path
) -> None:
    draft_token_ids = torch.tensor([0, 2, 3, 100, 511])
    plain = replace(architecture, has_qk_norm=False, is_tied=False)
    drafter = Eagle3Model(plain, num_aux=2, draft_vocab_size=5)
    save_drafter(drafter, tmp_path, draft_token_ids=draft_token_ids, aux_layer_ids=[0, 1])
    tensors = load_file(tmp_path / "model.safetensors")
    # SGLang's llama_eagle3.py: d2t holds differences.
    assert torch.equal(tensors["d2t"] + torch.arange(5), draft_token_ids)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), draft_token_ids)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["LlamaForCausalLMEagle3"]
    assert config.draft_vocab_size == 5
    assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == [0, 1]
