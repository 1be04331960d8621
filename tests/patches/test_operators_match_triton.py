"""Runs triton_twins.py where Triton's interpreter is switched on."""

from pathlib import Path

from tests.triton_interpreter import assert_passes_interpreted


def test_cpu_operators_match_sglang_triton_kernels() -> None:
    assert_passes_interpreted(Path(__file__).with_name("triton_twins.py"))
