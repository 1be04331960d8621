"""Runs triton_twins.py where Triton's interpreter is switched on."""

import os
import subprocess
import sys
from pathlib import Path


def test_cpu_operators_match_sglang_triton_kernels() -> None:
    twins = Path(__file__).with_name("triton_twins.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(twins)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
