"""Where this user's demo models and cost tables are kept from one run to the next."""

import os
from pathlib import Path


def user_cache() -> Path:
    """`sglang_hvd` in $XDG_CACHE_HOME, or else in ~/.cache. Raises ValueError, in one line, for a
    user without a home."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(named) if named else Path.home() / ".cache") / "sglang_hvd"
    except RuntimeError:
        raise ValueError("this user has no home to keep files in: set XDG_CACHE_HOME") from None
