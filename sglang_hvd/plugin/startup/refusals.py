"""Refuses settings of SGLang, and draft models, that HVD cannot serve.

All but two run before weights load. check_sampling runs before graphs are captured, check_update
while a server serves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length
from sglang.utils import is_in_ci

from sglang_hvd.allocation import max_tree_nodes
from sglang_hvd.config import option_name
from sglang_hvd.plugin.startup.flags import config_file_and_overrides

if TYPE_CHECKING:
    import torch
    from sglang.srt.server_args import ServerArgs


def refuse_stray_flags(server_args: ServerArgs) -> None:
    """Raises SystemExit if HVD flags are given without --speculative-algorithm HVD."""
    config_file, overrides = config_file_and_overrides(server_args)
    if config_file is not None or overrides:
        given = [option_name(name) for name in overrides]
        given += ["--hvd-config"] if config_file is not None else []
        raise SystemExit(
            f"error: {', '.join(sorted(given))} given without --speculative-algorithm HVD: "
            "add it or drop the flags"
        )


def refuse_untested(cfg: Any) -> None:
    """Raises ValueError for features of SGLang that are wrong or untested with HVD."""
    for refusal in untested(cfg):
        raise ValueError(refusal)


def untested(cfg: Any) -> list[str]:
    """A refusal for each feature of SGLang that is asked for and wrong or untested with HVD."""
    refusals = {
        "--speculative-adaptive": cfg.speculative_adaptive,
        "--speculative-use-rejection-sampling": cfg.speculative_use_rejection_sampling,
        "--speculative-use-block-verification": cfg.speculative_use_block_verification,
        # Below 1 a token may be accepted because it was drafted. Cache drafts come from other
        # clients' outputs, which would then change this client's output.
        "--speculative-accept-threshold-single below 1": not _is_one_or_more(
            cfg.speculative_accept_threshold_single
        ),
        "--speculative-accept-threshold-acc below 1": not _is_one_or_more(
            cfg.speculative_accept_threshold_acc
        ),
        # It needs to know which step of the draft loop a forward belongs to.
        f"--kv-canary {cfg.kv_canary}": cfg.kv_canary != "none",
        "--speculative-num-steps 0": cfg.speculative_num_steps == 0,
        "--enable-two-batch-overlap": cfg.enable_two_batch_overlap,
        "--enable-hisparse": cfg.enable_hisparse,
        "--enable-multi-layer-eagle": cfg.enable_multi_layer_eagle,
        # A mixed batch runs as a prefill. record_prefill does not expect running requests in it.
        "--enable-mixed-chunk": cfg.enable_mixed_chunk,
        # SGLang moves the KV of an accepted path to its place, but not the captured experts.
        "--enable-return-routed-experts": cfg.enable_return_routed_experts,
        "--enable-watermark": cfg.enable_watermark,
        "--enable-dp-attention": cfg.enable_dp_attention or (cfg.attn_dp_size or 1) > 1,
        # Ranks then split a step's tokens by numbers that only SGLang's own batches carry.
        f"--moe-a2a-backend {cfg.moe_a2a_backend}": cfg.moe_a2a_backend not in (None, "none"),
        "--moe-dense-tp-size": cfg.moe_dense_tp_size is not None,
        # Its ring of states has room for fewer nodes, which SGLang does not check for all models.
        "--enable-linear-replayssm-spec": cfg.enable_linear_replayssm_spec,
        # It keeps its own attention backends, for one width.
        "--enable-pdmux": cfg.enable_pdmux,
        "--pp-size above 1": cfg.pp_size > 1,
        # Moving accepted tokens treats all slots as the rank's own.
        "--dcp-size above 1": (cfg.dcp_size or 1) > 1,
        # Ranks then prefill parts of a prompt, which is untested.
        "--attn-cp-size above 1": cfg.attn_cp_size > 1,
        "--enable-prefill-cp": cfg.enable_prefill_cp,
        f"--disaggregation-mode {cfg.disaggregation_mode}": cfg.disaggregation_mode != "null",
        "--enable-pd-role-switch": cfg.enable_pd_role_switch,
        # It does not pass a plugin's figures on to meta_info.
        "SGLANG_RUST_SERVER": envs.SGLANG_RUST_SERVER.get(),
        # The simulated tokens would be drafted from, learned from and recorded.
        "SGLANG_SIMULATE_ACC_LEN": envs.SGLANG_SIMULATE_ACC_LEN.get() > 0,
    }
    return [
        f"HVD does not support {flag}: drop it or use EAGLE3"
        for flag, is_given in refusals.items()
        if is_given
    ]


def _is_one_or_more(value: object) -> bool:
    # While serving a setting may get a value of any type, or NaN.
    return isinstance(value, int | float) and value >= 1


def check_update(cfg: Any, updates: Mapping[str, object]) -> None:
    """Raises ValueError for new settings of a running server that HVD refuses at start, and for
    values that would end the server.

    Args:
        cfg: SGLang's view of the arguments in force.
        updates: new values by field name.
    """
    refuse_untested(_Updated(cfg, updates))
    size = updates.get("pp_max_micro_batch_size", 1)
    if not isinstance(size, int):
        raise ValueError(f"pp_max_micro_batch_size must be an integer, got {size!r:.100}")


class _Updated:
    """The arguments in force, some with new values."""

    def __init__(self, cfg: Any, updates: Mapping[str, object]) -> None:
        self._cfg = cfg
        self._updates = updates

    def __getattr__(self, name: str) -> Any:
        return self._updates[name] if name in self._updates else getattr(self._cfg, name)


def check_folders(cfg: Any) -> None:
    """Raises ValueError for a path that names no folder. SGLang would look for a model of that name
    on a hub."""
    paths = {
        "--model-path": cfg.model_path,
        "--speculative-draft-model-path": cfg.speculative_draft_model_path,
        "--tokenizer-path": cfg.tokenizer_path,
    }
    for flag, path in paths.items():
        if path is not None and path.startswith(("/", ".")) and not Path(path).exists():
            raise ValueError(f"{flag} {path}: there is no such folder: give one that exists")


def tree_of_flags(cfg: Any) -> int | None:
    """Nodes of the model drafter's tree by the flags, root included; None if SGLang chooses.

    cfg: SGLang's view of the arguments under resolution.

    Raises ValueError for a tree that is given in part, or has no nodes.
    """
    tree = {
        "--speculative-num-steps": cfg.speculative_num_steps,
        "--speculative-eagle-topk": cfg.speculative_eagle_topk,
        "--speculative-num-draft-tokens": cfg.speculative_num_draft_tokens,
    }
    given = {flag: value for flag, value in tree.items() if value is not None}
    for (flag, value), least in zip(tree.items(), (1, 1, 2), strict=True):
        if value is not None and value < least:
            raise ValueError(f"{flag} {value} drafts nothing: give at least {least}")
    num_steps, topk, width = tree.values()
    if not given:
        return None
    if topk == 1 and num_steps is not None:
        return int(num_steps) + 1  # a chain, whatever its number of nodes is said to be
    missing = [flag for flag in tree if flag not in given]
    if missing:
        raise ValueError(
            f"{' '.join(f'{flag} {value}' for flag, value in given.items())} describes a part of "
            f"the model drafter's tree: give {' and '.join(missing)} too, or none of the three"
        )
    check_model_tree(width, topk, num_steps)
    return int(width)


def check_model_tree(width: int, topk: int, num_steps: int) -> None:
    """Raises ValueError for a tree that the model drafter's steps cannot fill.

    width: nodes of the tree, root included.
    """
    widest = 1 + max_tree_nodes(topk, num_steps)
    if width > widest:
        raise ValueError(
            f"--speculative-num-draft-tokens {width} is more than the model drafter can "
            f"propose: {widest} with {num_steps} steps and topk {topk}. "
            "For a wider verification use --hvd-verify-width"
        )


def check_dtypes(cfg: Any, dtype: torch.dtype) -> None:
    """Raises ValueError for types that SGLang refuses once it begins to load the target model.

    dtype: of the target's activations, and of the drafter's.
    """
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS  # takes seconds to import

    methods = {
        "--quantization": cfg.quantization,
        "--speculative-draft-model-quantization": cfg.speculative_draft_model_quantization,
    }
    for flag, method in methods.items():
        config = QUANTIZATION_METHODS.get(method)
        takes = [dtype] if config is None else config.get_supported_act_dtypes()
        if dtype not in takes:
            names = " or ".join(str(each).removeprefix("torch.") for each in takes)
            raise ValueError(
                f"{flag} {method} needs activations of type {names}, not "
                f"{str(dtype).removeprefix('torch.')}: change --dtype"
            )


def check_sampling(max_nodes: int, vocab_size: int) -> None:
    """Raises ValueError for steps with more probabilities than FlashInfer's sampling kernels
    (sampling.cuh, `row_idx * d`) can number by 32 bits.

    max_nodes: nodes of all requests of the largest step.
    """
    if max_nodes * vocab_size > 2**32:
        raise ValueError(
            "FlashInfer's sampling numbers the probabilities of a step by 32 bits, and "
            f"{max_nodes} nodes of all requests and {vocab_size} words have more: lower "
            "--max-running-requests, --hvd-verify-width or --hvd-set wide_width"
        )


def check_draft_model(cfg: Any) -> None:
    """Raises ValueError unless the arguments name an EAGLE3 drafter made for this target model.

    Args:
        cfg: SGLang's view of the arguments under resolution.
    """
    path = cfg.speculative_draft_model_path
    if path is None:
        raise ValueError(
            "HVD needs an EAGLE3 drafter for this model: give --speculative-draft-model-path"
        )
    draft = draft_config(cfg)
    architectures = ", ".join(draft.architectures or ["of no named architecture"])
    # Some published drafters carry the target's architecture name; their draft vocabulary tells.
    if "eagle3" not in architectures.lower() and "draft_vocab_size" not in draft.to_dict():
        raise ValueError(
            f"draft model {path} is {architectures}, not an EAGLE3 drafter: give one that was "
            "trained for the target model"
        )
    target = target_config(cfg)
    target_vocab_size = target.get_text_config().vocab_size
    if draft.vocab_size != target_vocab_size:
        raise ValueError(
            f"draft model {path} has a vocabulary of {draft.vocab_size} tokens, the target model "
            f"{target_vocab_size}: use a drafter that was trained for {cfg.model_path}"
        )
    target_hidden_size = target.get_text_config().hidden_size
    num_drafted = draft.to_dict().get("draft_vocab_size") or draft.vocab_size
    if (cfg.speculative_eagle_topk or 1) > num_drafted:
        raise ValueError(
            f"--speculative-eagle-topk {cfg.speculative_eagle_topk} is more than the {num_drafted} "
            f"tokens that draft model {path} can draft: lower it"
        )
    made_for = draft.to_dict().get("target_hidden_size") or draft.hidden_size
    if made_for != target_hidden_size:
        raise ValueError(
            f"draft model {path} was made for a hidden size of {made_for}, the target model has "
            f"{target_hidden_size}: use a drafter that was trained for {cfg.model_path}"
        )


def check_draft_context(cfg: Any, context_len: int) -> None:
    """Raises ValueError for a drafter of a shorter context than the target model's, which SGLang
    refuses after it has loaded the target model.

    context_len: of the target model, as it is served.
    """
    draft_len = draft_context_len(cfg)
    if draft_len < context_len and not may_exceed_context():
        raise ValueError(
            f"draft model {cfg.speculative_draft_model_path} was made for contexts of {draft_len} "
            f"tokens, the target model is served with {context_len}: add --context-length "
            f"{draft_len}, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 to draft beyond it"
        )


def may_exceed_context() -> bool:
    """Whether SGLang lets a model run beyond the context it was made for."""
    return envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get() or is_in_ci()


def draft_context_len(cfg: Any) -> int:
    """Tokens of the context that the drafter was made for."""
    return int(get_context_length(draft_config(cfg).get_text_config()))


def target_config(cfg: Any) -> Any:
    """The target model's config. Raises ValueError, in one line, if it cannot be read."""
    return _config(cfg.model_path, cfg, cfg.revision, cfg.decrypted_config_file)


def draft_config(cfg: Any) -> Any:
    """The drafter's config. Raises ValueError, in one line, if it cannot be read."""
    revision, decrypted = cfg.speculative_draft_model_revision, cfg.decrypted_draft_config_file
    return _config(cfg.speculative_draft_model_path, cfg, revision, decrypted)


def _config(path: str, cfg: Any, revision: str | None, decrypted: str | None) -> Any:
    """The model's config, as SGLang reads it."""
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
