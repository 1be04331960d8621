"""Fixtures for data outside the repository, the forked servers, and which tests share a process."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from sglang_hvd.demo.server import demo_environment
from tests.e2e.forked_server import PROJECT_FIRST, Nursery

# No test asserts on time: an example may be slow because the machine is busy.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests with servers first, and give each file without a group its own.

    pytest-xdist runs a group in one process (`--dist loadgroup`). Files with a common group share
    servers and the process that forks them. Small groups come last, so that no process waits long.
    """
    for item in items:
        if item.path.parent.name == "e2e":
            item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}/{item.path.stem}"))
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


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
