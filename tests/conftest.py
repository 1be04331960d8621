"""Fixtures for data that lives outside the repository, and for the servers of several folders."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from sglang_hvd.demo.server import demo_environment
from tests.e2e.forked_server import PROJECT_FIRST, Nursery

# Nothing asserts on time: an example may be slow because the machine is busy.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


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
    """Forks servers; what it imports, it imports with the environment of all of them."""
    nursery = Nursery({**os.environ, **demo_environment(), **PROJECT_FIRST})
    yield nursery
    nursery.close()
