"""Tests that need Triton's interpreter, which is chosen when Triton is imported."""

import os
import sys
from pathlib import Path

from tests.e2e.forked_server import Nursery


def assert_passes_interpreted(file: Path, nursery: Nursery, folder: Path) -> None:
    """Run a file of tests in a forked process where the interpreter is on, and no plugin changes
    SGLang. The output goes into `folder`."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "SGLANG_PLUGINS": "none"}
    with (folder / "pytest.log").open("wb") as log:
        process = nursery.launch(command, environment, log)
    assert process.wait() == 0, (folder / "pytest.log").read_text()
