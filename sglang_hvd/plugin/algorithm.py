"""`--speculative-algorithm HVD`: an alias that resolves to EAGLE3 with our worker.

Every check in SGLang that compares the algorithm's name keeps working, as NEXTN does for EAGLE.
What makes it HVD is the `HvdLaunch` on the arguments record, which travels to every process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    model_config_of,
    resolved_view,
    resolving_view,
    use_mla_backend,
)
from sglang.srt.configs.hybrid_arch import mambaish_config

from sglang_hvd.allocation import (
    StepCosts,
    most_tree_nodes,
    powers_of_two_below,
    widths_that_save,
)
from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, HvdConfig, flag_name, load_config
from sglang_hvd.payoff import PayoffPredictor
from sglang_hvd.plugin.draft_model import check_draft_model, target_context_length
from sglang_hvd.plugin.flags import config_file_and_overrides, is_from_command_line
from sglang_hvd.plugin.tree_support import TargetAttention, verifies_trees
from sglang_hvd.traces.recording_folder import check_folder

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

logger = logging.getLogger(__name__)

ALGORITHM_NAME = "HVD"

# Nodes that policy `both` has for cache drafts where the model drafter's tree is a wide one.
_LEAST_BESIDE_TREE = 8

# Few requests on a GPU verify so many nodes of a dense model in little more time than one, and
# `allocate` does so only where it pays. For more requests the graphs' buffers, requests x width x
# context, grow too large.
_WIDE, _MOST_WIDE_NODES = 64, 1024

# Layers that keep a state instead of a KV cache keep one of every node, for each request that may
# run: 75 MB in Qwen3-Next, for which SGLang lowers max-running-requests.
_LINEAR_WIDTH = 8

# These read the width of each verification from the batch, not from the settings.
_BACKENDS_OF_ANY_WIDTH = {"torch_native", "intel_amx"}


@dataclass(frozen=True, slots=True)
class HvdLaunch:
    """What a scheduler process needs to know to run HVD.

    Attributes:
        config: the settings in force.
        num_model_nodes: nodes of the model drafter's tree, root included.
        widths: nodes per request in one verification, root included, to choose from; rising.
        has_width_states: attention backends and graphs are of one width each.
        backends: attention backends of the target model.
        attention: what is known of the target model's before it is loaded.
        postpones_extend: draft-extend runs for a request when it drafts, not in every step for all.
    """

    config: HvdConfig
    num_model_nodes: int
    widths: tuple[int, ...]
    has_width_states: bool
    backends: frozenset[str]
    attention: TargetAttention
    postpones_extend: bool

    def verifies_trees(self, topk: int, *, has_window: bool) -> bool:
        """Whether drafts may branch: both of a request in one tree, and the cache's own. Raises
        ValueError where drafts would be verified wrongly.

        has_window: what is known for certain once the target model is loaded.
        """
        return verifies_trees(
            self.backends,
            replace(self.attention, has_window=has_window or self.attention.has_window),
            topk=topk,
            needs_trees=self.config.policy == "both",
        )

    @property
    def verify_width(self) -> int:
        """The widest."""
        return self.widths[-1]

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, tuple(getattr(self, field.name) for field in fields(self))


def launch_of(server_args: ServerArgs) -> HvdLaunch | None:
    """The launch that was resolved for these arguments, None when HVD was not asked for."""
    return server_args.__dict__.get("_hvd_launch")


def resolve_hvd_config(
    handle_speculative_decoding: Callable[[ServerArgs], None], server_args: ServerArgs
) -> None:
    """AROUND hook: reads and checks the HVD settings before SGLang resolves the algorithm.

    A user's mistake ends a command line with one line, and raises ValueError for other callers.
    """
    if not _is_requested(server_args):
        _refuse_stray_flags(server_args)
        handle_speculative_decoding(server_args)
        return
    from sglang_hvd.plugin.entry import require_hooks

    try:
        require_hooks()
        server_args._hvd_config = _checked_config(server_args)
        handle_speculative_decoding(server_args)
    except (ValueError, RuntimeError) as error:
        if is_from_command_line(server_args):
            raise SystemExit(f"error: {error}") from error
        raise


def resolve_hvd_alias(
    resolve_alias: Callable[..., str | None], algorithm: str | None, *args: Any, **kwargs: Any
) -> str | None:
    """AROUND hook: HVD is EAGLE3 wherever SGLang compares names."""
    if algorithm == ALGORITHM_NAME:
        from sglang_hvd.plugin.entry import require_hooks

        try:
            require_hooks()  # or a server without our worker would serve under this name
        except RuntimeError as error:
            raise SystemExit(f"error: {error}") from error
    return resolve_alias("EAGLE3" if algorithm == ALGORITHM_NAME else algorithm, *args, **kwargs)


def resolve_verify_width(
    handle_eagle_family: Callable[[ServerArgs], None], server_args: ServerArgs
) -> None:
    """AROUND hook: `speculative_num_draft_tokens` becomes the verify width.

    SGLang sizes KV slots, masks and graphs by that field; the model drafter's own node count,
    which the user gave under the same name, is kept in the launch.
    """
    handle_eagle_family(server_args)
    config = server_args.__dict__.get("_hvd_config")
    if config is None:
        return
    cfg = resolved_view(server_args)
    _refuse_untested(cfg)  # again: SGLang may have switched features on by itself
    num_model_nodes = cfg.speculative_num_draft_tokens
    _check_model_tree(num_model_nodes, cfg.speculative_eagle_topk, cfg.speculative_num_steps)
    attention = _target_attention(cfg)
    width = _verify_width(config, num_model_nodes, cfg, attention)
    context_len = cfg.context_length or target_context_length(cfg)
    if width >= context_len:
        raise ValueError(
            f"--hvd-verify-width {width} leaves nothing of the context of {context_len} tokens: "
            "lower it"
        )
    declare_resolution(server_args, "hvd.verify_width", speculative_num_draft_tokens=width)
    # These backends read the width from each batch.
    backends = frozenset(name for name in attention_backends_of(cfg) if name is not None)
    is_any_width = cfg.device == "cpu" and backends <= _BACKENDS_OF_ANY_WIDTH
    narrow = _narrow_widths(config, width, cfg, is_any_width)
    launch = HvdLaunch(
        config,
        num_model_nodes,
        widths=(*narrow, width),
        has_width_states=bool(narrow) and not is_any_width,
        backends=backends,
        attention=attention,
        postpones_extend=_postpones_extend(config, cfg.device),
    )
    launch.verifies_trees(cfg.speculative_eagle_topk, has_window=False)  # refused before it loads
    server_args._hvd_launch = launch
    logger.info(
        "HVD: policy %s, verify width %d (model drafter's tree %d). The width takes %d tokens "
        "from the usable context; each running request reserves at least %d KV slots.",
        config.policy,
        width,
        num_model_nodes,
        width,
        2 * max(width, cfg.speculative_num_steps * cfg.speculative_eagle_topk),
    )


def create_hvd_worker(
    create_worker: Callable[..., type | None],
    algorithm: SpeculativeAlgorithm,
    server_args: ServerArgs,
) -> type | None:
    """AROUND hook: our worker class where an HVD launch was resolved."""
    if launch_of(server_args) is None:
        raw_name = server_args.speculative_algorithm or ""
        assert raw_name.upper() != ALGORITHM_NAME, "HVD was asked for but its launch is missing"
        return create_worker(algorithm, server_args)
    from sglang_hvd.plugin.worker import HvdWorker

    return HvdWorker


def _arrive(*launch: Any) -> HvdLaunch:
    # Runs when a scheduler process unpickles its arguments. Without this check a process in
    # which the plugin failed to load would serve plain EAGLE3 under the name of HVD.
    from sglang_hvd.plugin.entry import require_hooks

    require_hooks()
    return HvdLaunch(*launch)


def _is_requested(server_args: ServerArgs) -> bool:
    name = resolving_view(server_args).speculative_algorithm
    return name is not None and name.upper() == ALGORITHM_NAME


def _checked_config(server_args: ServerArgs) -> HvdConfig:
    config_file, overrides = config_file_and_overrides(server_args)
    config = load_config(config_file, overrides, os.environ)
    # A file that cannot be used is refused before any model loads.
    if config.predicts:
        PayoffPredictor.of_config(config)
    if config.threshold is not None and config.policy != "payoff":
        logger.warning(
            "HVD: policy %s has no threshold: --hvd-threshold %g is not heeded.",
            config.policy,
            config.threshold,
        )
    if config.costs is not None:
        StepCosts.load(config.costs)
    if config.record is not None:
        check_folder(config.record)
    cfg = resolving_view(server_args)
    _refuse_untested(cfg)
    check_draft_model(cfg)
    if cfg.enable_deterministic_inference:
        logger.warning(
            "HVD: greedy output is deterministic, sampled output is not: SGLang draws by a node's "
            "slot, and which drafts stand there depends on earlier requests."
        )
    return config


def _refuse_stray_flags(server_args: ServerArgs) -> None:
    config_file, overrides = config_file_and_overrides(server_args)
    if config_file is not None or overrides:
        given = [flag_name(name) for name in overrides]
        given += ["--hvd-config"] if config_file is not None else []
        raise SystemExit(
            f"error: {', '.join(sorted(given))} given without --speculative-algorithm HVD: "
            "add it or drop the flags"
        )


def _refuse_untested(cfg: Any) -> None:
    """Raise for SGLang features whose combination with HVD is known wrong or not tested."""
    refusals = {
        "--speculative-adaptive": cfg.speculative_adaptive,
        "--speculative-use-rejection-sampling": cfg.speculative_use_rejection_sampling,
        "--speculative-use-block-verification": cfg.speculative_use_block_verification,
        "--speculative-num-steps 0": cfg.speculative_num_steps == 0,
        "--enable-two-batch-overlap": cfg.enable_two_batch_overlap,
        "--enable-hisparse": cfg.enable_hisparse,
        "--enable-multi-layer-eagle": cfg.enable_multi_layer_eagle,
        "--enable-mixed-chunk": cfg.enable_mixed_chunk,
        # SGLang moves the KV of an accepted path to where it belongs, and not what it captured.
        "--enable-return-routed-experts": cfg.enable_return_routed_experts,
        "--enable-dp-attention": cfg.enable_dp_attention or (cfg.attn_dp_size or 1) > 1,
        # Its ring of states is made for fewer nodes, and nothing checks that for all models.
        "--enable-linear-replayssm-spec": cfg.enable_linear_replayssm_spec,
        # It keeps attention backends of its own, for one width.
        "--enable-pdmux": cfg.enable_pdmux,
        "--pp-size above 1": cfg.pp_size > 1,
        f"--disaggregation-mode {cfg.disaggregation_mode}": cfg.disaggregation_mode != "null",
    }
    for flag, is_given in refusals.items():
        if is_given:
            raise ValueError(f"HVD does not support {flag}: drop it or use EAGLE3")


def _check_model_tree(num_nodes: int, topk: int, num_steps: int) -> None:
    num_candidates = 1 + most_tree_nodes(topk, num_steps)
    if num_nodes > num_candidates:
        raise ValueError(
            f"--speculative-num-draft-tokens {num_nodes} is more than the model drafter can "
            f"propose: {num_candidates} with {num_steps} steps and topk {topk}. "
            "For a wider verification use --hvd-verify-width"
        )


def _narrow_widths(config: HvdConfig, widest: int, cfg: Any, is_any_width: bool) -> tuple[int, ...]:
    has_lora = _has_lora(cfg)
    if config.narrow_widths is None:
        if is_any_width:
            return powers_of_two_below(widest)
        if config.policy != "allocate" or has_lora:
            return ()
        saving = widths_that_save(widest, max(cfg.max_running_requests, 1))
        # What is nearly free by the rule is weighed all the same where it is twice the default.
        is_wide = widest > DEFAULT_VERIFY_WIDTH and not saving
        return (DEFAULT_VERIFY_WIDTH,) if is_wide else saving
    if config.narrow_widths and has_lora and not is_any_width:
        # The metadata of LoRA's graphs is that of the graphs captured last.
        raise ValueError(
            "HVD does not support --hvd-narrow-widths with LoRA on this device: drop one"
        )
    if config.narrow_widths and config.narrow_widths[-1] >= widest:
        raise ValueError(
            f"--hvd-narrow-widths {list(config.narrow_widths)} must stay below the verify width "
            f"{widest}"
        )
    return config.narrow_widths


def _postpones_extend(config: HvdConfig, device: str) -> bool:
    if not config.drafts_with_model:
        return False  # there is none
    # On a GPU draft-extend runs while the host reads what was accepted; postponed, it waits for it.
    return device == "cpu" if config.postpone_extend is None else config.postpone_extend


def _target_attention(cfg: Any) -> TargetAttention:
    """What the target model's config file says of it."""
    model_config = model_config_of(cfg)
    return TargetAttention(
        is_mla=use_mla_backend(cfg),
        is_linear=mambaish_config(model_config) is not None,
        is_chunked=model_config.is_local_attention_model,
        has_window=model_config.is_hybrid_swa,
        page_size=cfg.page_size or 1,
    )


def _verify_width(
    config: HvdConfig, num_model_nodes: int, cfg: Any, attention: TargetAttention
) -> int:
    if config.policy == "model" and config.verify_width is None:
        return num_model_nodes
    beside_tree = _LEAST_BESIDE_TREE if config.policy == "both" else 0
    if config.verify_width is None:
        wanted = min(_default_width(config, cfg, attention), 1 + config.max_draft_tokens)
        return max(num_model_nodes + beside_tree, wanted)
    if beside_tree and config.verify_width == num_model_nodes:
        raise ValueError(
            f"--hvd-verify-width {config.verify_width} has no room for a cache draft beside the "
            f"model drafter's tree of {num_model_nodes} nodes: widen it or use another policy"
        )
    if config.verify_width < num_model_nodes:
        raise ValueError(
            f"--hvd-verify-width {config.verify_width} is narrower than the model drafter's tree "
            f"of {num_model_nodes} nodes: widen it or lower --speculative-num-draft-tokens"
        )
    return config.verify_width


def _default_width(config: HvdConfig, cfg: Any, attention: TargetAttention) -> int:
    if attention.is_linear:
        return _LINEAR_WIDTH
    is_wide = (
        config.policy == "allocate"
        and cfg.device != "cpu"
        and _WIDE * cfg.max_running_requests <= _MOST_WIDE_NODES
        and config.narrow_widths != ()  # else every step would be as wide
        and not _has_lora(cfg)  # likewise
        and not _has_experts(model_config_of(cfg).hf_text_config)  # nodes have experts of their own
    )
    return _WIDE if is_wide else DEFAULT_VERIFY_WIDTH


def _has_lora(cfg: Any) -> bool:
    return bool(cfg.enable_lora or cfg.lora_paths)


def _has_experts(text_config: Any) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text_config, name, 0) or 0) > 1 for name in names)
