"""A minute of fuzzing under sanitizers, calls without memory, calls while it indexes, and steps."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.sh")


@pytest.mark.slow
def test_a_minute_of_random_operations_breaks_nothing(tmp_path: Path) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler to build the fuzzer with")
    done = subprocess.run([RUN, "60", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "threads: sound" in done.stdout
    assert done.stdout.count("steps: sound") == 2
