"""Entry point: changes to SGLang 0.5.23 that a CPU without AMX needs. Inactive on a GPU.

SGLang logs and swallows what plugins raise, so a failure here ends the process instead
(SystemExit is not swallowed), and argument validation checks that every hook was applied.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import torch

SGLANG_VERSION = "0.5.23"


def register() -> None:
    """Called by SGLang in every process, before arguments are parsed."""
    if torch.cuda.is_available():
        return
    _check_host()
    # Not at the top: these import `sgl_kernel`, which on a GPU is another package.
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        from sgl_kernel_cpu import hooks

        hooks.install()
        if _replays_graphs():
            from sgl_kernel_cpu import replayed_graphs

            replayed_graphs.install()
    except (ImportError, AttributeError, RuntimeError) as error:
        _stop(f"SGLang {SGLANG_VERSION} is not as expected ({error}): reinstall it")
    register_resolution_hook("handle_speculative_decoding")(check_arguments)


def check_arguments(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution hook: called by SGLang while it validates arguments, after `apply_hooks`."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_kernel_cpu import hooks

    previous(server_args)
    targets = set(hooks.TARGETS)
    if _replays_graphs():
        from sgl_kernel_cpu import replayed_graphs

        targets |= set(replayed_graphs.TARGETS)
    missing = targets - HookRegistry._patched
    if missing:
        _stop(f"these hooks did not apply, see the log above: {', '.join(sorted(missing))}")
    if resolving_view(server_args).speculative_use_rejection_sampling:
        raise ValueError(
            "--speculative-use-rejection-sampling needs a GPU: leave it out, "
            "sampling is lossless without it"
        )


def _replays_graphs() -> bool:
    return os.environ.get("SGL_KERNEL_CPU_REPLAYED_GRAPHS") == "1"


def _check_host() -> None:
    found = version("sglang")
    if found != SGLANG_VERSION:
        _stop(f"made for SGLang {SGLANG_VERSION}, found {found}: see patches/README.md")
    for other in ("sgl-kernel", "sglang-kernel"):
        with suppress(PackageNotFoundError):
            version(other)
            _stop(
                f"{other} is installed too and both provide sgl_kernel: "
                "uninstall sgl-kernel-cpu to serve on a GPU, or the other to serve on the CPU"
            )
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        _stop("no GPU was found: export SGLANG_USE_CPU_ENGINE=1 to serve on the CPU")


def _stop(message: str) -> NoReturn:
    sys.exit(f"sgl_kernel_cpu: {message}")
