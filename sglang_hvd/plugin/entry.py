"""The entry point that SGLang calls to load the plugin: `register` and nothing else."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

from sglang_hvd.plugin.startup.supported import record_hooks, require_supported_sglang


def register() -> None:
    """Registers all hooks. The hooks do nothing unless a server is asked for HVD.

    If registering fails, a command line that asks for HVD ends here with one line. For every other
    caller SGLang logs the error and goes on without HVD. A launcher with wrong flags ends before
    the hooks import the modules that they hook into, which takes seconds.
    """
    try:
        require_supported_sglang()
        launch_flags = _launch_flags()
        if launch_flags is not None:
            from sglang_hvd.plugin.hooks.server_args import check_command_line

            check_command_line(launch_flags)
        from sglang.srt.plugins.hook_registry import HookRegistry

        from sglang_hvd.plugin.hooks.hook_table import HOOKS
    except (ImportError, AttributeError, RuntimeError) as error:
        if any(word.upper().removeprefix("--SPECULATIVE-ALGORITHM=") == "HVD" for word in sys.argv):
            raise SystemExit(f"error: the HVD plugin cannot load: {_reason(error)}") from error
        raise
    for target, (kind, hook) in HOOKS.items():
        HookRegistry.register(target, hook, kind)
    record_hooks(HOOKS)


def _launch_flags() -> list[str] | None:
    """The flags of a process that was started as `python -m sglang.launch_server`, or as `sglang
    serve`; None for any other. Its children have its command line too."""
    program, *flags = sys.argv or [""]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if multiprocessing.parent_process() is not None:
        return None
    if spec is not None and spec.name == "sglang.launch_server":
        return flags
    if Path(program).name != "sglang" or flags[:1] != ["serve"]:
        return None
    flags = flags[1:]
    if any(flag.startswith("--model-type") for flag in flags):
        return None  # the one flag that only `sglang serve` has
    is_model_first = bool(flags) and not flags[0].startswith("-")
    return ["--model-path", *flags] if is_model_first else flags


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError) and (error.name or "").endswith("._native"):
        # Python searches the working directory first, where the sources are not built.
        return f"{error}: install it with pip install --editable, or start outside its sources"
    return str(error)
