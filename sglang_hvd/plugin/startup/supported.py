"""Which SGLang the plugin supports, and whether all of its hooks are in place.

SGLang logs an exception of a plugin or of a hook and carries on without it. A server that was
asked for HVD must not carry on, so `require_hooks` is called where HVD is about to be used: when
arguments are resolved, when they arrive in a scheduler process, and when the worker is built.

Nothing here imports SGLang at the top: an unsupported version may lack the modules, and must be
recognised before anything is imported from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

SUPPORTED_SGLANG = "0.5.23"

_registered: set[str] = set()


def record_hooks(targets: Iterable[str]) -> None:
    """Remembers the targets in SGLang that the entry point registered hooks for."""
    _registered.update(targets)


def require_hooks() -> int:
    """Returns how many hooks there are. Raises RuntimeError unless this SGLang is supported and
    every one of them is in place."""
    require_supported_sglang()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()  # does nothing if they are loaded already
    missing = sorted(_registered - HookRegistry._patched)
    if missing or not _registered:
        where = ", ".join(missing) or "any place"
        raise RuntimeError(
            f"HVD could not hook into SGLang at {where}: see the log above for the cause, and "
            "check that SGLANG_PLUGINS, if set, names hvd"
        )
    return len(_registered)


def require_supported_sglang() -> None:
    """Raises RuntimeError for any SGLang but SUPPORTED_SGLANG, and where there is none."""
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        raise RuntimeError(
            f"HVD needs SGLang {SUPPORTED_SGLANG}, and none is installed: "
            f"pip install 'sglang=={SUPPORTED_SGLANG}'"
        ) from None
    if installed != SUPPORTED_SGLANG:
        raise RuntimeError(
            f"HVD supports SGLang {SUPPORTED_SGLANG}, got {installed}: "
            f"pip install 'sglang=={SUPPORTED_SGLANG}'"
        )
