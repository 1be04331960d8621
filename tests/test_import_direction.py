"""Imports point one way, and the frameworks stay in their folders."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sglang_hvd"

# What each part of the package may import from the others. A part is a file or a folder of the
# package, or a room: a folder inside a folder, such as "replay/core". A part that may import a
# folder may import all its rooms. suffix_cache, payoff and allocation never see each other: values
# of types.py are all that passes between them.
CORE = {
    "_native",
    "types",
    "config",
    "whole_file",
    "yaml_text",
    "user_cache",
    "step_clock",
    "request_stats",
    "suffix_cache",
    "payoff",
    "costs",
    "allocation",
    "drafter",
    "view",
}
MAY_IMPORT = {
    "types": set(),
    "config": {"yaml_text"},
    "whole_file": set(),
    "yaml_text": set(),
    "user_cache": set(),
    "step_clock": set(),
    "request_stats": {"types"},
    "_native": set(),
    "suffix_cache": {"_native", "types", "config", "whole_file"},
    "payoff": {"_native", "types", "config", "whole_file"},
    "costs": {"yaml_text"},
    "allocation": {"_native", "types", "config", "costs"},
    "drafter": {
        *("_native", "types", "config", "step_clock", "request_stats"),
        *("suffix_cache", "payoff", "allocation", "view/cycles"),
    },
    "view/cycles": set(),
    "view": {"whole_file", "view/cycles"},
    "paper": {"config", "view"},
    "traces": {"types"},
    "replay/core": CORE | {"traces"},
    "replay/training": {"_native", "config", "payoff", "whole_file", "replay/core"},
    "replay/report": {
        *("types", "config", "payoff", "costs", "traces", "view"),
        *("replay/core", "replay/training"),
    },
    "plugin": set(),
    "plugin/device": {"allocation"},
    "plugin/startup": {"types", "config", "yaml_text", "user_cache", "allocation", "traces"},
    "plugin/trees": {"_native", "types"},
    "plugin/warming": {"types", "suffix_cache", "traces", "plugin/device"},
    "plugin/requests": {
        *("types", "config", "step_clock", "request_stats"),
        *("suffix_cache", "payoff", "allocation", "drafter", "traces", "whole_file"),
        *("plugin/startup", "plugin/warming", "plugin/device", "view/cycles"),
    },
    "plugin/sampling": {"plugin/requests", "plugin/trees", "plugin/device"},
    "plugin/engine": {
        *CORE,
        *("plugin/sampling", "plugin/requests", "plugin/trees"),
        *("plugin/startup", "plugin/device"),
    },
    "plugin/hooks": {
        *("config", "suffix_cache", "payoff", "costs", "traces"),
        *("plugin/engine", "plugin/requests", "plugin/trees", "plugin/startup", "plugin/device"),
    },
    "plugin/entry": {"plugin/hooks", "plugin/startup"},
    "plugin/examination": {"config", "payoff", "plugin/hooks", "plugin/startup"},
    "demo": CORE | {"traces", "replay", "demo/server_forker"},
    "demo/server_forker": {"demo", "plugin"},
    "commands": {
        *(*CORE, "traces", "replay", "paper", "demo"),
        *("plugin/startup", "plugin/examination"),
    },
    "cli": {"commands"},
}

# Where a framework may be imported: a folder, or one file.
FRAMEWORKS = {
    "sglang": ("plugin/", "demo/server_forker.py"),
    "sgl_kernel": ("plugin/",),
    "torch": ("plugin/", "demo/", "replay/training/fit.py"),
    "triton": ("plugin/",),
    "transformers": ("plugin/", "demo/", "traces/chat_templates.py"),
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


def part_of(names: Sequence[str]) -> str:
    """The part that a module belongs to, by its folders in the package and its own name."""
    room = "/".join(names[:2])
    return room if room in MAY_IMPORT else names[0]


def may_import(part: str, other: str) -> bool:
    allowed = MAY_IMPORT.get(part, set())
    return other == part or other in allowed or other.split("/")[0] in allowed


def breaches(path: str, source: str) -> list[str]:
    """What the file at `path`, relative to the package, imports against the rules."""
    names = path.removesuffix(".py").split("/")
    part = part_of(names)
    found = []
    for module in imported_modules(source, ".".join(["sglang_hvd", *names[:-1]])):
        package, *inside = module.split(".")
        if package == "sglang_hvd" and inside and not may_import(part, part_of(inside)):
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
    files = [path for path in source_files() if not path.endswith("__init__.py")]
    parts = {part_of(path.removesuffix(".py").split("/")) for path in files}
    assert parts <= MAY_IMPORT.keys()


def imports_of_files() -> dict[str, set[str]]:
    """The files of the package that each one imports, late and type-only imports included."""
    of_module = {
        "sglang_hvd." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in source_files()
    }
    found: dict[str, set[str]] = {}
    for path in source_files():
        package = ".".join(["sglang_hvd", *path.split("/")[:-1]])
        modules = list(imported_modules((PACKAGE / path).read_text(), package))
        # `from a.b import c` names a.b.c, which is a file or a name in a/b.
        files = {of_module.get(name, of_module.get(name.rpartition(".")[0])) for name in modules}
        found[path] = {file for file in files if file is not None and file != path}
    return found


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of files that import each other, directly or through others."""
    reached = {path: _reached(path, imports) for path in imports}
    groups = {
        tuple(sorted(other for other in reached[path] if path in reached.get(other, ())))
        for path in imports
    }
    return sorted(list(group) for group in groups if len(group) > 1)


def _reached(path: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [path]
    while todo:
        for other in imports.get(todo.pop(), set()) - found:
            found.add(other)
            todo.append(other)
    return found


def test_no_files_import_each_other() -> None:
    # A package's __init__ only lists what its files offer.
    imports = {
        path: {other for other in others if not other.endswith("__init__.py")}
        for path, others in imports_of_files().items()
    }
    assert circles(imports) == []


def test_a_circle_is_found() -> None:
    imports = {"a.py": {"b.py"}, "b.py": {"c.py"}, "c.py": {"a.py"}, "d.py": {"a.py"}}
    assert circles(imports) == [["a.py", "b.py", "c.py"]]


def test_no_two_files_have_one_name() -> None:
    names = [path.split("/")[-1] for path in source_files()]
    assert sorted(n for n in set(names) if names.count(n) > 1 and n != "__init__.py") == []


def test_no_folder_is_larger_than_a_dozen_files() -> None:
    folders = [path.rpartition("/")[0] for path in source_files() if "__init__" not in path]
    assert sorted(f for f in set(folders) if folders.count(f) > 12) == []


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
        ("drafter/proposals.py", "from ..replay.core import totals"),
        ("replay/core/walk.py", "from sglang_hvd.replay.training.train import TrainPlan"),
        ("replay/core/walk.py", "from ..training import train"),
        ("replay/core/walk.py", "from sglang_hvd.replay import training"),
        ("drafter/proposals.py", "from sglang_hvd.traces.trace import Trace"),
        ("traces/recorder.py", "from sglang_hvd.config import HvdConfig"),
        ("plugin/engine/worker.py", "from sglang_hvd.demo.models import build"),
        ("plugin/engine/worker.py", "from sglang_hvd.plugin.hooks import reload"),
        ("plugin/device/memory.py", "def late():\n    from sglang_hvd.plugin.engine import worker"),
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
        ("replay/training/fit.py", "import torch"),
        ("plugin/engine/worker.py", "from sglang.srt.managers import scheduler"),
        ("plugin/hooks/reload.py", "from sglang_hvd.plugin.engine.worker import HvdWorker"),
        ("drafter/proposals.py", "from sglang_hvd.payoff.predictor import AcceptancePredictor"),
        ("suffix_cache/cache.py", "from sglang_hvd._native import CacheCore"),
        ("replay/training/train.py", "from sglang_hvd.replay.core.walk import RecordingWalk"),
        ("replay/core/walk.py", "from sglang_hvd.replay.core.totals import CycleTotals"),
        ("commands/traces.py", "from sglang_hvd.replay.training import train"),
    ],
)
def test_a_right_import_passes(path: str, line: str) -> None:
    assert breaches(path, line) == []
