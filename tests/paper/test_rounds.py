"""Throughputs, speedups and their spread, worked out by hand."""

from __future__ import annotations

import pytest

from sglang_hvd.paper.rounds import Measured, Missing, Rounds
from tests.paper.made_up import measurement, result


def test_a_speedup_is_the_ratio_of_throughputs_in_the_same_round() -> None:
    measured = [
        measurement("greedy", "mbpp", 0, speed=100),
        measurement("greedy", "mbpp", 1, speed=50),
        measurement("greedy", "mbpp", 2, speed=200),
        measurement("hvd-paper", "mbpp", 0, speed=150),
        measurement("hvd-paper", "mbpp", 1, speed=100),
        measurement("hvd-paper", "mbpp", 2, speed=240),
    ]
    found = Rounds(result(["mbpp"], measurements=tuple(measured)))
    assert found.speedup("hvd-paper", "greedy", "mbpp") == pytest.approx(Measured(1.5, 1.2, 2.0, 3))


def test_a_slower_mode_has_a_speedup_below_one() -> None:
    found = Rounds(result()).speedup("suffix", "greedy", "mbpp")
    assert isinstance(found, Measured)
    assert found.value == pytest.approx(0.8)
    assert isinstance(Rounds(result()).speedup("hvd", "ngram", "mbpp"), Missing)
