"""Resolves `--speculative-algorithm HVD`: an alias of EAGLE3 that runs our worker.

So every check in SGLang that compares the algorithm's name keeps working, as for NEXTN, its alias
of EAGLE. The `HvdLaunch` on the arguments record makes it HVD; the record travels to every process.
"""

from __future__ import annotations

import argparse
import logging
import os
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import HTTPException
from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    model_config_of,
    resolved_view,
    resolving_view,
    use_mla_backend,
)
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.server_args import ServerArgs

from sglang_hvd.config import HvdConfig, load_config
from sglang_hvd.costs import StepCosts
from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.plugin.startup.attention_support import TargetAttention
from sglang_hvd.plugin.startup.devices import check_device, check_memory_and_gpu
from sglang_hvd.plugin.startup.flags import (
    add_hvd_flags,
    config_file_and_overrides,
    is_from_command_line,
    keep_hvd_flags,
)
from sglang_hvd.plugin.startup.launch import HvdLaunch, launch_of
from sglang_hvd.plugin.startup.refusals import (
    check_draft_context,
    check_draft_model,
    check_dtypes,
    check_folders,
    check_model_tree,
    check_update,
    refuse_stray_flags,
    refuse_untested,
    tree_of_flags,
    untested,
)
from sglang_hvd.plugin.startup.verify_widths import (
    check_pool,
    check_verify_width,
    slots_ahead,
    verify_widths,
)
from sglang_hvd.suffix_cache.snapshot import check_snapshot_place
from sglang_hvd.traces.reader import text_files
from sglang_hvd.traces.recording_folder import check_folder

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ConfigureLoggingReq, SetInternalStateReq
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

ALGORITHM_NAME = "HVD"

# These backends read the width of each verification from the batch, not from the settings.
_BACKENDS_OF_ANY_WIDTH = {"torch_native", "intel_amx"}


def check_command_line(flags: Sequence[str]) -> None:
    """Ends a launcher of which the flags alone tell that it cannot start: with one line, or with
    SGLang's usage if a flag is unknown. Does nothing unless something of HVD is asked for.

    flags: of `python -m sglang.launch_server`. The arguments are not resolved, and nothing is
        hooked yet.
    """
    if not any("hvd" in flag.lower() for flag in flags) or "--config" in flags:
        return  # SGLang's --config names a file of more flags
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    add_hvd_flags(None, parser)
    server_args = keep_hvd_flags(
        ServerArgs.from_cli_args.__func__, ServerArgs, parser.parse_args(flags)
    )
    try:
        if _is_requested(server_args):
            _checked_config(server_args)
        else:
            refuse_stray_flags(server_args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


def end_in_one_line(check: Callable[[ServerArgs], None], server_args: ServerArgs) -> None:
    """AROUND hook of ServerArgs.resolve_once and .check_server_args, which a launcher calls before
    it starts any process: what SGLang itself refuses ends a command line that asks for HVD with one
    line too."""
    if not _is_command_line_of_hvd(server_args):
        check(server_args)
        return
    try:
        check_folders(resolving_view(server_args))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    try:
        check(server_args)
    except Exception as error:  # SGLang refuses by errors of every type, and the error goes on
        text = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
        kind = type(error).__name__
        raise SystemExit(f"error: refused by SGLang, {kind}: {text}") from error


def check_launch(check_server_args: Callable[[ServerArgs], None], server_args: ServerArgs) -> None:
    """AROUND hook of ServerArgs.check_server_args. Also checks memory and the GPU. `doctor`, which
    only examines a launch, does not call this."""
    end_in_one_line(check_server_args, server_args)
    if _is_command_line_of_hvd(server_args):
        try:
            check_memory_and_gpu(resolved_view(server_args))
        except ValueError as error:
            raise SystemExit(f"error: {error}") from error


def _is_command_line_of_hvd(server_args: ServerArgs) -> bool:
    is_resolved = launch_of(server_args) is not None
    return is_from_command_line(server_args) and (is_resolved or _is_requested(server_args))


def resolve_hvd_config(
    handle_speculative_decoding: Callable[[ServerArgs], None], server_args: ServerArgs
) -> None:
    """AROUND hook: reads and checks the HVD settings before SGLang resolves the algorithm.

    A user's mistake ends a command line with one line, and raises ValueError for other callers.
    """
    if not _is_requested(server_args):
        refuse_stray_flags(server_args)
        handle_speculative_decoding(server_args)
        return
    from sglang_hvd.plugin.startup.supported import require_hooks

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
    """AROUND hook: the name HVD becomes EAGLE3."""
    if algorithm == ALGORITHM_NAME:
        from sglang_hvd.plugin.startup.supported import require_hooks

        try:
            require_hooks()  # else a server without our worker could serve under this name
        except RuntimeError as error:
            raise SystemExit(f"error: {error}") from error
    return resolve_alias("EAGLE3" if algorithm == ALGORITHM_NAME else algorithm, *args, **kwargs)


def resolve_verify_width(
    handle_eagle_family: Callable[[ServerArgs], None], server_args: ServerArgs
) -> None:
    """AROUND hook: `speculative_num_draft_tokens` becomes the verify width.

    SGLang sizes masks and graphs by that field. The user gave the model drafter's node count under
    the same name; the launch keeps it.
    """
    handle_eagle_family(server_args)
    config = server_args.__dict__.get("_hvd_config")
    if config is None:
        return
    cfg = resolved_view(server_args)
    refuse_untested(cfg)  # again, because SGLang may have switched features on by itself
    model_tree_width = cfg.speculative_num_draft_tokens
    check_model_tree(model_tree_width, cfg.speculative_eagle_topk, cfg.speculative_num_steps)
    context_len = model_config_of(cfg).context_len
    check_draft_context(cfg, context_len)
    attention = _target_attention(cfg)
    widths_are_free = cfg.device == "cpu" and attention.backends <= _BACKENDS_OF_ANY_WIDTH
    widths = verify_widths(
        config,
        model_tree_width,
        cfg,
        attention,
        context_len=context_len,
        widths_are_free=widths_are_free,
    )
    check_pool(widths, cfg)
    declare_resolution(server_args, "hvd.verify_width", speculative_num_draft_tokens=widths.base)
    launch = HvdLaunch(
        config,
        model_tree_width,
        widths,
        has_width_states=len(widths.values) > 1 and not widths_are_free,
        attention=attention,
    )
    # Checked again once the models are loaded; here the config file already tells most of it.
    attention.check_draft_shapes(cfg.speculative_eagle_topk, needs_trees=config.policy == "both")
    check_device(cfg, attention.backends)
    check_dtypes(cfg, model_config_of(cfg).dtype)
    server_args._hvd_launch = launch
    logger.info(
        "HVD: policy %s, verify width %d (model drafter's tree %d)%s. Each running request "
        "reserves at least %d KV slots.",
        config.policy,
        widths.base,
        model_tree_width,
        "" if widths.widest == widths.base else f", {widths.widest} for one or two requests",
        slots_ahead(widths.widest, cfg),
    )


def resolve_widest(
    resolve_max_draft_tokens: Callable[..., int | None],
    algorithm: SpeculativeAlgorithm,
    server_args: ServerArgs,
) -> int | None:
    """AROUND hook: SGLang sizes KV windows by the server's widest verification, as for its own
    adaptive speculation."""
    launch = launch_of(server_args)
    if launch is None:
        return resolve_max_draft_tokens(algorithm, server_args)
    return launch.widths.widest


def count_logits_rows(max_decode_logits_rows: Callable[..., int], runner: ModelRunner) -> int:
    """AROUND hook: sizes SGLang's array for the logits of its graphs by the largest graph. SGLang
    would multiply the widest verification by the largest batch, a graph that is never captured."""
    launch = launch_of(runner.server_args)
    if launch is None:
        return max_decode_logits_rows(runner)
    from sglang_hvd.plugin.device.graph_sizes import sizes_of_width

    return max(
        width * sizes_of_width(runner, launch.widths, width)[-1] for width in launch.widths.values
    )


def create_hvd_worker(
    create_worker: Callable[..., type | None],
    algorithm: SpeculativeAlgorithm,
    server_args: ServerArgs,
) -> type | None:
    """AROUND hook: returns our worker class if an HVD launch was resolved."""
    if launch_of(server_args) is None:
        raw_name = server_args.speculative_algorithm or ""
        assert raw_name.upper() != ALGORITHM_NAME, "HVD was asked for but its launch is missing"
        return create_worker(algorithm, server_args)
    # Once more: the environment, or a program that uses SGLang's engine, may have changed them.
    refuse_untested(resolved_view(server_args))
    from sglang_hvd.plugin.engine.worker import HvdWorker

    return HvdWorker


async def refuse_update(
    set_internal_state: Callable[..., Awaitable[list[bool]]],
    manager: TokenizerManager,
    obj: SetInternalStateReq,
) -> list[bool]:
    """AROUND hook of TokenizerManager.set_internal_state, which changes settings of a running
    server. What HVD refuses at start gets a 400 here."""
    if launch_of(manager.server_args) is not None:
        try:
            check_update(resolved_view(manager.server_args), obj.server_args)
        except ValueError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error
    return await set_internal_state(manager, obj)


def refuse_log_level(
    configure_logging: Callable[..., None], manager: TokenizerManager, obj: ConfigureLoggingReq
) -> None:
    """AROUND hook of TokenizerManager.configure_logging. SGLang would take a level that it does not
    have, and answer every later request with an error."""
    level = obj.log_requests_level
    if launch_of(manager.server_args) is not None and level not in (None, 0, 1, 2, 3):
        fault = f"log_requests_level must be 0, 1, 2 or 3, got {level}"
        raise HTTPException(HTTPStatus.BAD_REQUEST, fault)
    configure_logging(manager, obj)


def _is_requested(server_args: ServerArgs) -> bool:
    name = resolving_view(server_args).speculative_algorithm
    return name is not None and name.upper() == ALGORITHM_NAME


def config_of(server_args: ServerArgs) -> HvdConfig:
    """The settings of the flags, of the YAML file and of the environment. Raises ValueError, in
    one line, if they are wrong."""
    config_file, overrides = config_file_and_overrides(server_args)
    return load_config(config_file, overrides, os.environ)


def refusals_of(config: HvdConfig, cfg: Any) -> Iterator[ValueError]:
    """Why a server with these arguments will not start, as far as that is known before any model
    loads. Nothing if it may start.

    cfg: SGLang's view of the arguments under resolution.
    """
    if config.predicts:
        yield from _refusal(AcceptancePredictor.of_config, config)
    if config.costs is not None:
        yield from _refusal(StepCosts.load, config.costs)
    if config.record is not None:
        yield from _refusal(check_folder, config.record)
    if config.snapshot is not None:
        yield from _refusal(check_snapshot_place, config.snapshot)
    if config.warm_from is not None:
        yield from _refusal(text_files, config.warm_from)
    yield from map(ValueError, untested(cfg))
    try:
        model_tree_width = tree_of_flags(cfg)
        if model_tree_width is not None:
            check_verify_width(config, model_tree_width)
    except ValueError as error:
        yield error
    missing = list(_refusal(check_folders, cfg))
    yield from missing or _refusal(check_draft_model, cfg)


def _refusal(check: Callable[[_T], object], checked: _T) -> Iterator[ValueError]:
    try:
        check(checked)
    except ValueError as error:
        yield error


def _checked_config(server_args: ServerArgs) -> HvdConfig:
    config = config_of(server_args)
    cfg = resolving_view(server_args)
    for refusal in refusals_of(config, cfg):
        raise refusal
    return config


def _target_attention(cfg: Any) -> TargetAttention:
    """The target model's attention, by its config file and SGLang's settings."""
    model_config = model_config_of(cfg)
    return TargetAttention(
        backends=frozenset(name for name in attention_backends_of(cfg) if name is not None),
        is_mla=use_mla_backend(cfg),
        is_linear=mambaish_config(model_config) is not None,
        is_chunked=model_config.is_local_attention_model,
        has_window=model_config.is_hybrid_swa,
        page_size=cfg.page_size or 1,
        is_deterministic=cfg.enable_deterministic_inference,
    )
