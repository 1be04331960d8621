"""Checks that need only the models' config files, before any weights load."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.utils.hf_transformers_utils import get_config


def check_draft_model(cfg: Any) -> None:
    """Raise ValueError unless the arguments name an EAGLE3 drafter made for this target model.

    Args:
        cfg: SGLang's view of the arguments under resolution.
    """
    path = cfg.speculative_draft_model_path
    if path is None:
        raise ValueError(
            "HVD needs an EAGLE3 drafter for this model: give --speculative-draft-model-path"
        )
    draft = _config(
        path, cfg, cfg.speculative_draft_model_revision, cfg.decrypted_draft_config_file
    )
    architectures = ", ".join(draft.architectures or ["of no named architecture"])
    # Some published drafters carry the target's architecture name; the draft vocabulary tells.
    if "eagle3" not in architectures.lower() and "draft_vocab_size" not in draft.to_dict():
        raise ValueError(
            f"draft model {path} is {architectures}, not an EAGLE3 drafter: give one that was "
            "trained for the target model"
        )
    target = _config(cfg.model_path, cfg, cfg.revision, cfg.decrypted_config_file)
    target_vocab_size = target.get_text_config().vocab_size
    if draft.vocab_size != target_vocab_size:
        raise ValueError(
            f"draft model {path} has a vocabulary of {draft.vocab_size} tokens, the target model "
            f"{target_vocab_size}: use a drafter that was trained for {cfg.model_path}"
        )
    target_hidden_size = target.get_text_config().hidden_size
    made_for = draft.to_dict().get("target_hidden_size") or draft.hidden_size
    if made_for != target_hidden_size:
        raise ValueError(
            f"draft model {path} was made for a hidden size of {made_for}, the target model has "
            f"{target_hidden_size}: use a drafter that was trained for {cfg.model_path}"
        )


def _config(path: str, cfg: Any, revision: str | None, decrypted: str | None) -> Any:
    """As SGLang reads it for the model that it serves."""
    file = {"_configuration_file": decrypted.strip()} if decrypted else {}
    try:
        return get_config(
            path,
            trust_remote_code=cfg.trust_remote_code,
            revision=revision,
            model_override_args=json.loads(cfg.json_model_override_args),
            model_config_parser=cfg.model_config_parser,
            **file,
        )
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"cannot read the model config of {path}: {reason}") from error
