"""How many nodes per request the verifications of a server take."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of

from sglang_hvd.allocation import VerifyWidths, powers_of_two_below, widths_that_save
from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, HvdConfig
from sglang_hvd.plugin.startup.attention_support import TargetAttention

# Nodes that policy `both` has for cache drafts where the model drafter's tree is a wide one.
_LEAST_BESIDE_TREE = 8

# This backend reads a verification's width from the batch, and from the settings the widest.
_READS_MOST_FROM_SETTINGS = "intel_amx"

# Layers that keep a state instead of a KV cache keep one of every node, for each request that may
# run: 75 MB in Qwen3-Next, for which SGLang lowers max-running-requests.
_LINEAR_WIDTH = 8

# This backend verifies with a kernel for decoding, and runs draft-extend with it. FlashInfer tests
# the kernel with five tokens for each request, and its users speak of 16 (flashinfer issue 3570),
# which it gets unless told.
_VERIFIES_BY_DECODING = "trtllm_mha"
_DECODING_WIDTH = 16


def verify_widths(
    config: HvdConfig,
    model_tree_width: int,
    cfg: Any,
    attention: TargetAttention,
    *,
    context_len: int,
    widths_are_free: bool,
) -> VerifyWidths:
    """The verify widths of a server that is about to start.

    model_tree_width: of the model drafter's tree, root included.
    cfg: SGLang's resolved arguments.
    attention: of the target model.
    context_len: tokens of the server's context.
    widths_are_free: the backends read the width from each batch, so that widths cost nothing.

    Raises ValueError, in one line, for settings that do not fit each other.
    """
    base = _verify_width(config, model_tree_width, cfg, attention)
    narrow = _narrow_widths(config, base, cfg, widths_are_free=widths_are_free)
    if config.wide_width is None:
        wide = _default_wide_width(config, base, cfg, attention, context_len)
    else:
        wide = config.wide_width
        _check_wide_width(wide, base, cfg, attention, widths_are_free=widths_are_free)
    for flag, width in (("--hvd-verify-width", base), ("--hvd-wide-width", wide)):
        if width >= context_len:
            raise ValueError(
                f"{flag} {width} leaves nothing of the context of {context_len} tokens: lower it"
            )
    beyond = () if wide == base else (wide,)
    asked_for = {*(config.narrow_widths or ()), *(beyond if config.wide_width else ())}
    return VerifyWidths((*narrow, base, *beyond), base, frozenset(asked_for))


def may_run_ahead(config: HvdConfig, cfg: Any) -> bool:
    """Whether the settings let steps run ahead: without overlap scheduling SGLang reads the tokens
    of a step before it goes on.

    cfg: SGLang's resolved arguments.
    """
    return config.run_ahead and not cfg.disable_overlap_schedule


def _verify_width(
    config: HvdConfig, model_tree_width: int, cfg: Any, attention: TargetAttention
) -> int:
    if config.policy == "model" and config.verify_width is None:
        return model_tree_width
    beside_tree = _LEAST_BESIDE_TREE if config.policy == "both" else 0
    if config.verify_width is None:
        default = DEFAULT_VERIFY_WIDTH
        if attention.is_linear:
            default = _LINEAR_WIDTH
        elif _verifies_by_decoding(cfg):
            default = _DECODING_WIDTH
        return max(model_tree_width + beside_tree, min(default, 1 + config.max_draft_tokens))
    if beside_tree and config.verify_width == model_tree_width:
        raise ValueError(
            f"--hvd-verify-width {config.verify_width} has no room for a cache draft beside the "
            f"model drafter's tree of {model_tree_width} nodes: widen it or use another policy"
        )
    if config.verify_width < model_tree_width:
        raise ValueError(
            f"--hvd-verify-width {config.verify_width} is narrower than the model drafter's tree "
            f"of {model_tree_width} nodes: widen it or lower --speculative-num-draft-tokens"
        )
    return config.verify_width


def _check_wide_width(
    wide: int, base: int, cfg: Any, attention: TargetAttention, *, widths_are_free: bool
) -> None:
    if wide < base:
        raise ValueError(
            f"--hvd-wide-width {wide} is narrower than the verify width {base}: widen it, or lower "
            "--hvd-verify-width"
        )
    if wide == base:
        return
    reason = None
    if attention.is_linear:
        reason = "linear attention"  # SGLang sizes a part of its states by the base
    elif not widths_are_free:
        reason = _reason_for_one_width(cfg)
    elif _READS_MOST_FROM_SETTINGS in attention_backends_of(cfg):
        reason = f"attention backend {_READS_MOST_FROM_SETTINGS}"
    if reason is not None:
        raise ValueError(f"HVD does not support --hvd-wide-width with {reason}: drop it")


def _default_wide_width(
    config: HvdConfig, base: int, cfg: Any, attention: TargetAttention, context_len: int
) -> int:
    """The wide width where none is asked for; the base means that there is none. A dense model
    verifies so many nodes of one or two requests in little more time than one node, and `allocate`
    does so only where it pays."""
    wide = config.default_wide_width(base)
    if wide is None:
        return base
    is_wide = (
        wide < context_len
        and cfg.device != "cpu"
        and not attention.is_linear
        and not _verifies_by_decoding(cfg)
        and _reason_for_one_width(cfg) is None
        and not _has_experts(model_config_of(cfg).hf_text_config)  # nodes have experts of their own
    )
    return wide if is_wide else base


def _narrow_widths(
    config: HvdConfig, base: int, cfg: Any, *, widths_are_free: bool
) -> tuple[int, ...]:
    reason = _reason_for_one_width(cfg)
    if config.narrow_widths is None:
        if widths_are_free:
            return powers_of_two_below(base)
        if config.policy != "allocate" or reason is not None:
            return ()
        saving = widths_that_save(base, max(cfg.max_running_requests, 1))
        if may_run_ahead(config, cfg) and 1 not in saving:
            saving = (1, *saving)
        # What is nearly free by the rule is weighed all the same where it is twice the default.
        is_twice = base >= 2 * DEFAULT_VERIFY_WIDTH and not {*saving} - {1}
        return (*saving, DEFAULT_VERIFY_WIDTH) if is_twice else saving
    if config.narrow_widths and reason is not None and not widths_are_free:
        raise ValueError(f"HVD does not support --hvd-narrow-widths with {reason}: drop one")
    if config.narrow_widths and config.narrow_widths[-1] >= base:
        raise ValueError(
            f"--hvd-narrow-widths {list(config.narrow_widths)} must stay below the verify width "
            f"{base}"
        )
    return config.narrow_widths


def _verifies_by_decoding(cfg: Any) -> bool:
    # Draft-extend has as many tokens of each request as the verification before it.
    of_drafter = cfg.speculative_draft_attention_backend
    return _VERIFIES_BY_DECODING in (*attention_backends_of(cfg), of_drafter)


def _reason_for_one_width(cfg: Any) -> str | None:
    """What keeps all verifications to the base width where widths are not free, if anything."""
    if cfg.enable_lora or cfg.lora_paths:
        return "LoRA on this device"  # its graphs have the metadata of those captured last
    if cfg.enable_deterministic_inference:
        return "--enable-deterministic-inference"  # sums have another order at another width
    return None


def _has_experts(text_config: Any) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text_config, name, 0) or 0) > 1 for name in names)
