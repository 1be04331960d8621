"""Fixtures for data that lives outside the repository."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

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
