"""A model whose own sampling settings keep cache drafts from being verified."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.configs.model_config import ModelConfig

from sglang_hvd.config import HvdConfig, Policy
from sglang_hvd.plugin.hooks import server_args


def model(folder: Path, *, penalty: float, sampling_defaults: str) -> ModelConfig:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1},
    }
    (folder / "config.json").write_text(json.dumps(config))
    own = {"do_sample": True, "temperature": 0.7, "repetition_penalty": penalty}
    (folder / "generation_config.json").write_text(json.dumps(own))
    return ModelConfig(str(folder), sampling_defaults=sampling_defaults)


@pytest.mark.parametrize(
    ("penalty", "sampling_defaults", "policy", "is_told"),
    [
        (1.05, "model", "allocate", True),
        (1.05, "openai", "allocate", False),
        (1.05, "model", "model", False),  # which verifies no cache drafts anyway
        (1.0, "model", "allocate", False),
    ],
)
def test_a_penalty_of_the_models_own_is_told_at_start(
    penalty: float,
    sampling_defaults: str,
    policy: Policy,
    is_told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = model(tmp_path, penalty=penalty, sampling_defaults=sampling_defaults)
    monkeypatch.setattr(server_args, "model_config_of", lambda cfg: config)
    cfg: Any = None
    with caplog.at_level(logging.WARNING):
        server_args._warn_of_default_penalty(HvdConfig(policy=policy), cfg)
    assert ("repetition_penalty of 1.05" in caplog.text) == is_told
