"""What of two models' config files ends a start."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.configs.model_config import ModelConfig

from sglang_hvd.plugin.startup.refusals import (
    check_draft_context,
    check_draft_model,
    check_folders,
)

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


def arguments(
    folder: Path, *, overrides: str = "{}", topk: int | None = None, **of_draft: Any
) -> Any:
    """SGLang's, for a target and a drafter with these config files."""
    llama = {"model_type": "llama", **SIZES}
    configs = {
        "target": {**llama, "architectures": ["LlamaForCausalLM"]},
        "drafter": {**llama, "architectures": ["LlamaForCausalLMEagle3"], **of_draft},
    }
    for name, content in configs.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(content))
    return SimpleNamespace(
        model_path=str(folder / "target"),
        speculative_draft_model_path=str(folder / "drafter"),
        speculative_eagle_topk=topk,
        revision=None,
        speculative_draft_model_revision=None,
        decrypted_config_file=None,
        decrypted_draft_config_file=None,
        model_config_parser="auto",
        json_model_override_args=overrides,
        trust_remote_code=False,
    )


def test_a_drafter_that_was_made_for_the_target_is_taken(tmp_path: Path) -> None:
    check_draft_model(arguments(tmp_path))


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("model_path", "--model-path"),
        ("speculative_draft_model_path", "--speculative-draft-model-path"),
        ("tokenizer_path", "--tokenizer-path"),
    ],
)
def test_a_path_without_a_folder_is_told_from_the_name_of_a_model(
    tmp_path: Path, field: str, flag: str
) -> None:
    cfg = arguments(tmp_path)
    cfg.tokenizer_path = None
    check_folders(cfg)
    setattr(cfg, field, "some/model")
    check_folders(cfg)
    for path in (str(tmp_path / "gone"), "./gone"):
        setattr(cfg, field, path)
        with pytest.raises(ValueError, match=f"^{flag} {path}: there is no such folder: give one"):
            check_folders(cfg)


def test_a_tree_branches_no_further_than_the_vocabulary(tmp_path: Path) -> None:
    check_draft_model(arguments(tmp_path / "fits", topk=8, draft_vocab_size=8))
    with pytest.raises(ValueError, match="-topk 9 is more than the 8 tokens that draft model"):
        check_draft_model(arguments(tmp_path / "wide", topk=9, draft_vocab_size=8))


def test_a_draft_vocabulary_says_what_the_name_does_not(tmp_path: Path) -> None:
    named = ["LlamaForCausalLM"]
    check_draft_model(arguments(tmp_path, architectures=named, draft_vocab_size=8))


@pytest.mark.parametrize(
    ("of_draft", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "not an EAGLE3 drafter"),
        ({"vocab_size": 64}, "a vocabulary of 64 tokens, the target model 32"),
        ({"hidden_size": 8}, "made for a hidden size of 8, the target model has 16"),
        ({"target_hidden_size": 24}, "made for a hidden size of 24"),
    ],
)
def test_a_drafter_of_another_model_is_refused(
    tmp_path: Path, of_draft: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_draft_model(arguments(tmp_path, **of_draft))


def test_what_overrides_the_config_files_counts(tmp_path: Path) -> None:
    overridden = arguments(tmp_path, overrides='{"vocab_size": 64}', draft_vocab_size=8)
    check_draft_model(overridden)
    (tmp_path / "target" / "config.json").unlink()
    overridden.decrypted_config_file = str(tmp_path / "drafter" / "config.json")
    check_draft_model(overridden)


def test_a_config_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    given = arguments(tmp_path)
    given.model_path = str(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"cannot read the model config of .*gone"):
        check_draft_model(given)


def test_a_drafter_of_a_shorter_context_is_refused_where_sglang_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(tmp_path, max_position_embeddings=1024)

    def in_sglang(context_len: int) -> int:
        path = given.speculative_draft_model_path
        model = ModelConfig(path, context_length=context_len, is_draft_model=True)
        return int(model.context_len)

    check_draft_context(given, 1024)
    assert in_sglang(1024) == 1024
    with pytest.raises(ValueError, match=r"made for contexts of 1024 .* add --context-length 1024"):
        check_draft_context(given, 1025)
    with pytest.raises(ValueError, match="greater than the derived context_length"):
        in_sglang(1025)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    check_draft_context(given, 1025)
    assert in_sglang(1025) == 1025
