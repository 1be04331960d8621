"""The entry point that SGLang calls to load the plugin: `register` and nothing else."""

from __future__ import annotations

import multiprocessing
import sys

from sglang_hvd.plugin.startup.supported import record_hooks, require_supported_sglang


def register() -> None:
    """Registers all hooks. The hooks do nothing unless a server is asked for HVD.

    If registering fails, a command line that asks for HVD ends here with one line. For every other
    caller SGLang logs the error and goes on without HVD. A launcher with wrong flags ends before
    the hooks import the modules that they hook into, which takes seconds.
    """
    try:
        require_supported_sglang()
        if _is_launcher():
            from sglang_hvd.plugin.hooks.server_args import check_command_line

            check_command_line(sys.argv[1:])
        from sglang.srt.plugins.hook_registry import HookRegistry

        from sglang_hvd.plugin.hooks.hook_table import HOOKS
    except (ImportError, AttributeError, RuntimeError) as error:
        if any(word.upper().removeprefix("--SPECULATIVE-ALGORITHM=") == "HVD" for word in sys.argv):
            raise SystemExit(f"error: the HVD plugin cannot load: {_reason(error)}") from error
        raise
    for target, (kind, hook) in HOOKS.items():
        HookRegistry.register(target, hook, kind)
    record_hooks(HOOKS)


def _is_launcher() -> bool:
    """Whether this process was started as `python -m sglang.launch_server`. Its children have its
    command line too."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    is_child = multiprocessing.parent_process() is not None
    return spec is not None and spec.name == "sglang.launch_server" and not is_child


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError) and (error.name or "").endswith("._native"):
        # Python searches the working directory first, where the sources are not built.
        return f"{error}: install it with pip install --editable, or start outside its sources"
    return str(error)
