"""Runs triton_twins.py where Triton's interpreter is switched on."""

from pathlib import Path

from tests.e2e.forked_server import Nursery
from tests.triton_interpreter import assert_passes_interpreted


def test_cpu_operators_match_sglang_triton_kernels(nursery: Nursery, tmp_path: Path) -> None:
    assert_passes_interpreted(Path(__file__).with_name("triton_twins.py"), nursery, tmp_path)
