"""Where this user's cost tables and the logs of `sglang-hvd serve` are kept."""

from pathlib import Path

from platformdirs import user_cache_path


def user_cache() -> Path:
    """The user's cache folder; on Linux `sglang_hvd` in $XDG_CACHE_HOME or ~/.cache.

    Raises ValueError, in one line, for a user without a home.
    """
    try:
        path = user_cache_path("sglang_hvd", appauthor=False)
    except RuntimeError:
        path = Path()
    if not path.is_absolute():
        raise ValueError("this user has no home to keep files in: set XDG_CACHE_HOME")
    return path


def costs_folder() -> Path | None:
    """The folder of this user's kept tables of step costs; None for a user without a home."""
    try:
        return user_cache() / "costs"
    except ValueError:
        return None
