"""The entry point that SGLang calls: registers every hook of Hybrid Verified Decoding.

SGLang logs an exception of a plugin or of a hook and carries on without it. A server that was
asked for HVD must not carry on, so `require_hooks` is called where HVD is about to be used: when
arguments are resolved, when they arrive in a scheduler process, and when the worker is built.

Nothing here imports SGLang at the top: another version may lack what the hooks import, and has to
be told apart first.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

SUPPORTED_SGLANG = "0.5.23"


def register() -> None:
    """Register all hooks; they do nothing unless a server is asked for HVD.

    If they cannot be registered, a command line that asks for HVD ends here with one line. For any
    other caller SGLang logs the error and goes on without HVD, as before the plugin was installed.
    """
    try:
        _require_supported_sglang()
        from sglang.srt.plugins.hook_registry import HookRegistry

        from sglang_hvd.plugin.hooks import HOOKS
    except (ImportError, AttributeError, RuntimeError) as error:
        if any(word.upper().removeprefix("--SPECULATIVE-ALGORITHM=") == "HVD" for word in sys.argv):
            raise SystemExit(f"error: the HVD plugin cannot load: {_reason(error)}") from error
        raise
    for target, (kind, hook) in HOOKS.items():
        HookRegistry.register(target, hook, kind)


def require_hooks() -> None:
    """Raise RuntimeError unless this SGLang is supported and every hook is in place."""
    _require_supported_sglang()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_hvd.plugin.hooks import HOOKS

    load_plugins()  # does nothing where they are loaded already
    missing = sorted(set(HOOKS) - HookRegistry._patched)
    if missing:
        raise RuntimeError(
            f"HVD could not hook into SGLang at {', '.join(missing)}: see the log above for the "
            "cause, and check that SGLANG_PLUGINS, if set, names hvd"
        )


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError) and (error.name or "").endswith("._native"):
        # Python looks first in the folder it starts in, where the sources are not built.
        return f"{error}: install it with pip install --editable, or start outside its sources"
    return str(error)


def _require_supported_sglang() -> None:
    installed = version("sglang")
    if installed != SUPPORTED_SGLANG:
        raise RuntimeError(
            f"HVD supports SGLang {SUPPORTED_SGLANG}, got {installed}: "
            f"pip install 'sglang=={SUPPORTED_SGLANG}'"
        )
