"""Imports point one way, and the frameworks stay in their folders."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sglang_hvd"

# What each part of the package may import from the others. suffix_cache, payoff and allocation
# never see each other: values of types.py are all that passes between them.
CORE = {
    "types",
    "config",
    "whole_file",
    "yaml_text",
    "user_cache",
    "step_clock",
    "request_stats",
    "suffix_cache",
    "payoff",
    "allocation",
    "drafter",
}
MAY_IMPORT = {
    "types": set(),
    "config": {"types", "yaml_text"},
    "whole_file": set(),
    "yaml_text": set(),
    "user_cache": set(),
    "step_clock": set(),
    "request_stats": {"types"},
    "suffix_cache": {"types", "config"},
    "payoff": {"types", "config", "whole_file"},
    "allocation": {"types", "config", "yaml_text"},
    "drafter": CORE - {"drafter"},
    "traces": {"types"},
    "replay": CORE | {"traces"},
    "plugin": CORE | {"traces", "running_server"},
    "demo": CORE | {"traces", "replay"},
    "running_server": {"allocation"},
    "commands": CORE | {"traces", "replay", "demo", "running_server"},
    "cli": {"commands", "demo"},
}

# Where a framework may be imported: a folder, or one file.
FRAMEWORKS = {
    "sglang": ("plugin/",),
    "sgl_kernel": ("plugin/",),
    "torch": ("plugin/", "demo/", "payoff/training.py"),
    "triton": ("plugin/",),
    "transformers": ("plugin/", "demo/"),
}


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Absolute dotted names of everything `source`, a module inside `package`, imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            # `from sglang_hvd import payoff` imports a part: its name is among the aliases.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str | None:
    """The part of sglang_hvd that a dotted name belongs to; None outside the package."""
    names = module.split(".")
    return names[1] if names[0] == "sglang_hvd" and len(names) > 1 else None


def breaches(path: str, source: str) -> list[str]:
    """What the file at `path`, relative to the package, imports against the rules."""
    names = path.removesuffix(".py").split("/")
    part = names[0]
    found = []
    for module in imported_modules(source, ".".join(["sglang_hvd", *names[:-1]])):
        other = part_of(module)
        if other is not None and other != part and other not in MAY_IMPORT.get(part, set()):
            found.append(f"{path} imports {module}")
        allowed = FRAMEWORKS.get(module.split(".")[0])
        if allowed is not None and not path.startswith(allowed):
            found.append(f"{path} imports {module}")
    return found


def source_files() -> list[str]:
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", source_files())
def test_imports_point_one_way(path: str) -> None:
    assert breaches(path, (PACKAGE / path).read_text()) == []


def test_every_part_has_its_place_in_the_order() -> None:
    parts = {path.split("/")[0].removesuffix(".py") for path in source_files()} - {"__init__"}
    assert parts <= MAY_IMPORT.keys()


def test_the_command_loads_no_framework_before_it_needs_one() -> None:
    command = (
        "import sys, sglang_hvd.cli; "
        f"print(sorted({set(FRAMEWORKS)} & {{name.split('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("types.py", "from sglang_hvd.config import HvdConfig"),
        ("payoff/features.py", "from sglang_hvd.suffix_cache import SuffixCache"),
        ("payoff/features.py", "from sglang_hvd import suffix_cache"),
        ("payoff/features.py", "from ..suffix_cache import SuffixCache"),
        ("payoff/features.py", "import sglang_hvd.drafter"),
        ("drafter/proposals.py", "from ..replay import totals"),
        ("drafter/proposals.py", "from sglang_hvd.traces.trace import Trace"),
        ("traces/recorder.py", "from sglang_hvd.config import HvdConfig"),
        ("plugin/worker.py", "from sglang_hvd.demo.models import build"),
        ("payoff/predictor.py", "import torch.nn as nn"),
        ("drafter/proposals.py", "def late():\n    import torch"),
        ("demo/server.py", "from sglang.srt.server_args import ServerArgs"),
        ("__init__.py", "from sglang_hvd.cli import main"),
    ],
)
def test_a_wrong_import_is_found(path: str, line: str) -> None:
    assert len(breaches(path, line)) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("payoff/features.py", "from .predictor import AcceptancePredictor"),
        ("payoff/training.py", "import torch"),
        ("plugin/worker.py", "from sglang.srt.managers import scheduler"),
        ("drafter/proposals.py", "from sglang_hvd.payoff.predictor import AcceptancePredictor"),
        ("suffix_cache/cache.py", "from sglang_hvd.suffix_cache._native import CacheCore"),
    ],
)
def test_a_right_import_passes(path: str, line: str) -> None:
    assert breaches(path, line) == []
