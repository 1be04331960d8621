"""The pages that describe the code, and CONTRIBUTING.md, name paths and definitions that exist."""

import ast
import builtins
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sglang_hvd"
PAGES = (
    "docs/architecture.md",
    "docs/upgrade-sglang.md",
    "docs/experiments/allocation.md",
    "docs/experiments/cost-model.md",
    "docs/experiments/predictor.md",
    "docs/experiments/suffix-cache.md",
    "CONTRIBUTING.md",
)

_PATH = re.compile(
    r"[\w./-]+/|[\w./-]*\w\.(?:py|pyi|hpp|cpp|md|toml|yaml|sh|inc)|[\w.-]+(?:/[\w.-]+)+"
)
_NAME = re.compile(r"[A-Z]\w+(?:\.\w+)*")


def spans(page: str) -> list[str]:
    """What the page writes in backticks."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    return re.findall(r"`([^`\n]+)`", text)


def is_there(path: str) -> bool:
    if "/" not in path:  # a name that files of several folders have
        return (ROOT / path).exists() or any(PACKAGE.rglob(path))
    return any((base / path).exists() for base in (ROOT, PACKAGE, PACKAGE / "plugin"))


def definitions() -> set[str]:
    """Classes, functions and constants of the package, and Class.member."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = _names(node)
            found |= names
            if isinstance(node, ast.ClassDef):
                members = set().union(*map(_names, node.body))
                found |= {f"{node.name}.{member}" for member in members}
    return found


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def missing(page_spans: list[str]) -> list[str]:
    known = definitions()
    lost = [span for span in page_spans if _PATH.fullmatch(span) and not is_there(span)]
    names = [span for span in page_spans if _NAME.fullmatch(span) and not span.startswith("HVD_")]
    return lost + [name for name in names if name not in known and not hasattr(builtins, name)]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_and_name_of_the_page_exists(page: str) -> None:
    assert missing(spans(page)) == []


def test_what_does_not_exist_is_found() -> None:
    there = [
        "plugin/engine/worker.py",
        "HvdWorker.verify_input",
        "HybridDrafter.commit",
        "drafter/",
    ]
    assert missing(there) == ["HvdWorker.verify_input"]
    lost = ["plugin/worker.py", "nowhere/", "no_such_file.py"]
    assert missing(lost) == lost
