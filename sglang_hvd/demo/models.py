"""The embedded demo models, which are built on first use and then kept.

python -m sglang_hvd.demo.models --cache-dir DIR [--shape llama|qwen3]
"""

import argparse
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from filelock import FileLock

import sglang_hvd
from sglang_hvd.demo.training.recipes import RECIPES, Recipe

Shape = Literal["llama", "qwen3"]

# What the built files depend on, relative to the package.
_SOURCES = (
    "types.py", "config.py", "native/*", "drafter/*.py", "payoff/*.py", "payoff/native/*",
    "suffix_cache/*.py", "suffix_cache/native/*",
    "replay/core/replayed.py", "replay/core/single_cycles.py", "replay/core/training_rows.py",
    "replay/training/fit.py",
    "traces/trace.py", "traces/tokenizer_json.py",
    "demo/corpus/*.py", "demo/training/*.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DemoModels:
    """Two checkpoint directories and a predictor file."""

    target: Path
    drafter: Path
    predictor: Path


def ensure_demo_models(
    cache_dir: Path, *, shape: Shape = "llama", progress: bool = True
) -> DemoModels:
    """The demo models in `cache_dir`. Builds them if this version has not built them there yet.

    A build takes some minutes on two cores and is deterministic. If two processes ask at the same
    time, one builds and the other waits. An interrupted build leaves no models.

    Raises ValueError if `cache_dir` cannot be written.
    """
    recipe = RECIPES[shape]
    directory = cache_dir / f"demo-{shape}-{_fingerprint(recipe)}"
    try:
        if not directory.is_dir():
            _build_once(recipe, directory, progress)
    except OSError as error:
        raise ValueError(
            f"cannot build the demo models in {cache_dir}: {error}: choose another --cache-dir"
        ) from error
    return DemoModels(
        target=directory / "target",
        drafter=directory / "drafter",
        predictor=directory / "predictor.safetensors",
    )


def _build_once(recipe: Recipe, directory: Path, progress: bool) -> None:
    from sglang_hvd.demo.training.build import build  # seconds of imports

    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_suffix(".lock")):
        if directory.is_dir():
            return
        prefix = f"partial-{directory.name}-"
        for killed in directory.parent.glob(f"{prefix}*"):
            shutil.rmtree(killed)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
        try:
            build(recipe, partial, progress=progress)
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _fingerprint(recipe: Recipe) -> str:
    """Changes with the recipe and with the code that follows it."""
    digest = hashlib.sha256(repr(recipe).encode())
    package = Path(sglang_hvd.__file__).parent
    for pattern in _SOURCES:
        for file in sorted(package.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the embedded demo models.")
    parser.add_argument("--cache-dir", type=Path, required=True, help="where to build them")
    parser.add_argument("--shape", choices=get_args(Shape), default="llama")
    options = parser.parse_args(arguments)
    try:
        models = ensure_demo_models(options.cache_dir, shape=options.shape)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"target    {models.target}\ndrafter   {models.drafter}\npredictor {models.predictor}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
