"""The entry point that SGLang calls: registers every hook of Hybrid Verified Decoding.

SGLang logs an exception of a plugin or of a hook and carries on without it. A server that was
asked for HVD must not carry on, so `require_hooks` is called where HVD is about to be used: when
arguments are resolved, when they arrive in a scheduler process, and when the worker is built.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_hvd.plugin import algorithm, flags, responses, server_info

SUPPORTED_SGLANG = "0.5.23"

# target in SGLang -> (kind, hook). tests/plugin/test_seams.py checks that each target exists.
HOOKS: dict[str, tuple[HookType, Callable[..., Any]]] = {
    "sglang.srt.server_args.ServerArgs.add_cli_args": (HookType.AFTER, flags.add_hvd_flags),
    "sglang.srt.server_args.ServerArgs.from_cli_args": (HookType.AROUND, flags.keep_hvd_flags),
    "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding": (
        HookType.AROUND,
        algorithm.resolve_hvd_config,
    ),
    "sglang.srt.arg_groups.speculative_hook._resolve_speculative_algorithm_alias": (
        HookType.AROUND,
        algorithm.resolve_hvd_alias,
    ),
    "sglang.srt.arg_groups.speculative_hook._handle_eagle_family": (
        HookType.AROUND,
        algorithm.resolve_verify_width,
    ),
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker": (
        HookType.AROUND,
        algorithm.create_hvd_worker,
    ),
    "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class": (
        HookType.AROUND,
        responses.stream_hvd_figures,
    ),
    "sglang.srt.managers.scheduler.Scheduler.on_idle": (
        HookType.AFTER,
        server_info.let_go_when_idle,
    ),
    "sglang.srt.managers.scheduler_components.internal_state."
    "SchedulerInternalStateController.get_internal_state": (
        HookType.AFTER,
        server_info.add_hvd_state,
    ),
}


def register() -> None:
    """Register all hooks; they do nothing unless a server is asked for HVD."""
    for target, (kind, hook) in HOOKS.items():
        HookRegistry.register(target, hook, kind)


def require_hooks() -> None:
    """Raise RuntimeError unless this SGLang is supported and every hook is in place."""
    load_plugins()  # does nothing where they are loaded already
    installed = version("sglang")
    if installed != SUPPORTED_SGLANG:
        raise RuntimeError(
            f"HVD supports SGLang {SUPPORTED_SGLANG}, got {installed}: "
            f"pip install 'sglang=={SUPPORTED_SGLANG}'"
        )
    missing = sorted(set(HOOKS) - HookRegistry._patched)
    if missing:
        raise RuntimeError(
            f"HVD could not hook into SGLang at {', '.join(missing)}: see the log above for the "
            "cause, and check that SGLANG_PLUGINS, if set, names hvd"
        )
