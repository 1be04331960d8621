"""Fixtures for data outside the repository, the forked servers, and which tests share a process."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from sglang_hvd.demo.server import demo_environment
from tests.e2e.forked_server import PROJECT_FIRST, Nursery

# No test asserts on time: an example may be slow because the machine is busy.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


# Files whose tests share servers, or the process that forks them. Each group of files runs in one
# process, and so does every other file.
_GROUPS = {
    "launchers": ("e2e/test_bad_input", "patches/test_serving"),
    "policies": (
        *("e2e/test_benchmark", "e2e/test_cycle_reports", "e2e/test_endings"),
        *("e2e/test_frontend", "e2e/test_identity"),
        *("e2e/test_reload", "e2e/test_requests", "e2e/test_weight_updates"),
    ),
    "parameters": ("e2e/test_every_parameter", "e2e/test_every_request", "e2e/test_seeded"),
    "interpreted servers": ("e2e/test_mixture", "e2e/test_overlap", "e2e/test_retraction"),
    "interpreted kernels": (
        *("patches/test_operators_match_triton", "device/test_flashinfer_plans"),
        *("trees/test_accepted_kv", "trees/test_layout_kernels"),
    ),
}
_COMPILED = ("test_arctic", "test_fuzz", "test_wheel")
_GROUP_OF = {file: group for group, files in _GROUPS.items() for file in files}


class _GroupScheduling(LoadScopeScheduling):
    """Runs each group in one process. (pytest-xdist's own groups do nothing under pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return _GROUP_OF.get("/".join(Path(file).with_suffix("").parts[-2:]), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _GroupScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with what compiles for minutes, then with the tests that have servers: small groups
    come last, so that no process waits for the other."""
    for item in items:
        if item.path.parent.name == "e2e":
            item.add_marker(pytest.mark.e2e)

    def place(item: pytest.Item) -> tuple[bool, bool]:
        return item.path.stem not in _COMPILED, item.get_closest_marker("e2e") is None

    items.sort(key=place)


def _path_from(variable: str, what: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set: it names {what}")
    path = Path(value)
    if not path.exists():
        pytest.fail(f"{variable}={value} does not exist: unset it or name {what}")
    return path


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """The folder of recorded generations (*.jsonl) that replay is tested on."""
    return _path_from("HVD_TRACES", "a folder of recorded generations")


@pytest.fixture(scope="session")
def tokenizer_file() -> Path:
    """The tokenizer.json that turns those generations into token ids."""
    return _path_from("HVD_TOKENIZER", "the tokenizer.json of the recorded generations")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks servers. It imports their modules once, with the environment common to all of them."""
    nursery = Nursery({**os.environ, **demo_environment(), **PROJECT_FIRST})
    yield nursery
    nursery.close()
