"""Tests that need Triton's interpreter, which is chosen when Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path


def assert_passes_interpreted(file: Path) -> None:
    """Runs a file of tests where the interpreter is switched on."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
