"""Chooses the verify widths of a server: how many nodes per request a verification may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of

from sglang_hvd.allocation import VerifyWidths, powers_of_two_below, widths_that_save
from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, HvdConfig, option
from sglang_hvd.plugin.startup.attention_support import TargetAttention

# Nodes that policy `both` reserves for the cache draft next to a wide tree of the model drafter.
_MIN_CACHE_NODES = 8

# Tokens of a request, prompt and output, that any server should hold. SGLang asks its own server
# for about as many before it serves.
_SHORTEST_REQUEST = 32

# This backend reads a verification's width from the batch, but the maximum width from the settings.
_READS_MAX_FROM_SETTINGS = "intel_amx"

# Layers with a state instead of a KV cache store one state per node for every request that may run:
# 75 MB in Qwen3-Next. SGLang lowers max-running-requests to make room for them.
_LINEAR_WIDTH = 8

# This backend verifies and runs draft-extend with a kernel made for decoding. FlashInfer tests that
# kernel with five tokens per request; its users report 16 (flashinfer issue 3570), the default
# here.
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

    model_tree_width: nodes of the model drafter's tree, root included.
    cfg: SGLang's resolved arguments.
    attention: the target model's attention.
    context_len: context length in tokens.
    widths_are_free: the backends read the width from each batch, so additional widths cost nothing.

    Raises ValueError, in one line, for settings that contradict each other.
    """
    base = _verify_width(config, model_tree_width, cfg, attention)
    narrow = _narrow_widths(config, base, cfg, widths_are_free=widths_are_free)
    if config.wide_width is None:
        wide = _default_wide_width(config, base, cfg, attention, context_len)
    else:
        wide = config.wide_width
        _check_wide_width(wide, base, cfg, attention, widths_are_free=widths_are_free)
    for field, width in (("verify_width", base), ("wide_width", wide)):
        if width >= context_len:
            raise ValueError(
                f"{option(field, width)} leaves nothing of the context of {context_len} tokens: "
                "lower it"
            )
    check_run_ahead(config, cfg, (*narrow, base))
    beyond = () if wide == base else (wide,)
    asked_for = {*(config.narrow_widths or ()), *(beyond if config.wide_width else ())}
    return VerifyWidths((*narrow, base, *beyond), base, frozenset(asked_for))


def check_run_ahead(
    config: HvdConfig, cfg: Any, widths: Sequence[int], *, plans_wait: bool = False
) -> None:
    """Checks that steps of a server can run ahead (engine/run_ahead.py) if the settings ask for it.
    Nothing else decides that: a server that starts with run_ahead does so.

    cfg: SGLang's resolved arguments. Without overlap scheduling SGLang reads the tokens of each
        step before it launches the next.
    widths: rising; before the start those that are wanted, after it those that were built.
    plans_wait: the attention's own plans wait for the last step, so that nothing would be gained.
        This is known once graphs are captured.

    Raises ValueError if the settings ask for it, and steps of this server cannot run ahead.
    """
    if config.run_ahead and (cfg.disable_overlap_schedule or widths[0] != 1 or plans_wait):
        raise ValueError(
            "--hvd-set run_ahead=true needs a verify width of 1, overlap scheduling (which is off "
            "on a CPU and with --disable-overlap-schedule) and, with FlashInfer, CUDA graphs and "
            "host_plans (docs/operate.md): drop it or change these"
        )


def slots_ahead(widest: int, cfg: Any) -> int:
    """KV slots that each running request reserves, at least: those of two steps. SGLang reserves
    more for trees on pages of several tokens.

    widest: nodes per request of the widest verification.
    cfg: SGLang's resolved arguments.
    """
    return 2 * max(widest, cfg.speculative_num_steps * cfg.speculative_eagle_topk)


def check_pool(widths: VerifyWidths, cfg: Any) -> None:
    """Raises ValueError for a KV pool, if its size is given, that no request fits into.

    cfg: SGLang's resolved arguments.
    """
    slots, num_tokens = slots_ahead(widths.widest, cfg), cfg.max_total_tokens
    if num_tokens is not None and num_tokens < _SHORTEST_REQUEST + slots:
        raise ValueError(
            f"--max-total-tokens {num_tokens} has no room for a request of {_SHORTEST_REQUEST} "
            f"tokens and the {slots} KV slots that it reserves: raise it, or verify fewer nodes "
            "(--hvd-verify-width, --speculative-num-draft-tokens)"
        )


def _verify_width(
    config: HvdConfig, model_tree_width: int, cfg: Any, attention: TargetAttention
) -> int:
    if config.policy == "model" and config.verify_width is None:
        return model_tree_width
    cache_nodes = _MIN_CACHE_NODES if config.policy == "both" else 0
    if config.verify_width is None:
        default = DEFAULT_VERIFY_WIDTH
        if attention.is_linear:
            default = _LINEAR_WIDTH
        elif _verifies_by_decoding(cfg):
            default = _DECODING_WIDTH
        return max(model_tree_width + cache_nodes, min(default, 1 + config.max_draft_tokens))
    check_verify_width(config, model_tree_width)
    return config.verify_width


def check_verify_width(config: HvdConfig, model_tree_width: int) -> None:
    """Raises ValueError for a verify_width, if one is given, that the model drafter's tree does not
    fit into.

    model_tree_width: nodes of the tree, root included.
    """
    if config.verify_width is None:
        return
    if config.policy == "both" and config.verify_width == model_tree_width:
        raise ValueError(
            f"--hvd-verify-width {config.verify_width} has no room for a cache draft next to "
            f"the model drafter's tree of {model_tree_width} nodes: widen it or use another policy"
        )
    if config.verify_width < model_tree_width:
        raise ValueError(
            f"--hvd-verify-width {config.verify_width} is narrower than the model drafter's tree "
            f"of {model_tree_width} nodes: widen it or lower --speculative-num-draft-tokens"
        )


def _check_wide_width(
    wide: int, base: int, cfg: Any, attention: TargetAttention, *, widths_are_free: bool
) -> None:
    if wide < base:
        raise ValueError(
            f"{option('wide_width', wide)} is narrower than the verify width {base}: widen it, or "
            "lower --hvd-verify-width"
        )
    if wide == base:
        return
    reason = None
    if attention.is_linear:
        reason = "linear attention"  # SGLang sizes part of its states by the base width
    elif not widths_are_free:
        reason = _reason_for_one_width(cfg)
    elif _READS_MAX_FROM_SETTINGS in attention_backends_of(cfg):
        reason = f"attention backend {_READS_MAX_FROM_SETTINGS}"
    if reason is not None:
        raise ValueError(f"HVD does not support --hvd-set wide_width with {reason}: drop it")


def _default_wide_width(
    config: HvdConfig, base: int, cfg: Any, attention: TargetAttention, context_len: int
) -> int:
    """The wide width if none was asked for; the base width means that there is none. A dense model
    verifies 64 nodes of one or two requests in little more time than one node, and `allocate`
    chooses that only where it pays."""
    wide = config.default_wide_width(base)
    if wide is None:
        return base
    is_wide = (
        wide < context_len
        and cfg.device != "cpu"
        and not attention.is_linear
        and not _verifies_by_decoding(cfg)
        and _reason_for_one_width(cfg) is None
        and not _has_experts(
            model_config_of(cfg).hf_text_config
        )  # each node activates its own experts
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
        if config.run_ahead and 1 not in saving:
            saving = (1, *saving)
        # At twice the default width the rule above may find nothing; keep the default width anyway.
        is_twice = base >= 2 * DEFAULT_VERIFY_WIDTH and not {*saving} - {1}
        return (*saving, DEFAULT_VERIFY_WIDTH) if is_twice else saving
    if config.narrow_widths and reason is not None and not widths_are_free:
        raise ValueError(f"HVD does not support --hvd-set narrow_widths with {reason}: drop one")
    if config.narrow_widths and config.narrow_widths[-1] >= base:
        raise ValueError(
            f"{option('narrow_widths', list(config.narrow_widths))} must stay below the verify "
            f"width {base}"
        )
    return config.narrow_widths


def _verifies_by_decoding(cfg: Any) -> bool:
    # Draft-extend processes as many tokens per request as the verification before it.
    of_drafter = cfg.speculative_draft_attention_backend
    return _VERIFIES_BY_DECODING in (*attention_backends_of(cfg), of_drafter)


def _reason_for_one_width(cfg: Any) -> str | None:
    """Why all verifications must have the base width where widths are not free; None if they need
    not."""
    if cfg.enable_lora or cfg.lora_paths:
        return "LoRA on this device"  # its graphs use the metadata of the graphs captured last
    if cfg.enable_deterministic_inference:
        return "--enable-deterministic-inference"  # another width sums in another order
    return None


def _has_experts(text_config: Any) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text_config, name, 0) or 0) > 1 for name in names)
