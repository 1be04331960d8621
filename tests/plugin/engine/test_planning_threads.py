"""How many threads of a scheduler process share its steps."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin.engine.step_parts import num_planning_threads


def threads(config: HvdConfig, *, tp_size: int = 1, dp_size: int = 1, nnodes: int = 1) -> int:
    args: Any = SimpleNamespace(tp_size=tp_size, dp_size=dp_size, nnodes=nnodes)
    return num_planning_threads(config, args)


@pytest.mark.parametrize(
    ("cores", "ranks", "wanted"),
    [
        (1, {}, 1),
        (2, {}, 1),
        (4, {}, 2),
        (16, {}, 4),
        (64, {"tp_size": 8}, 4),
        (32, {"tp_size": 8}, 2),
        (16, {"tp_size": 4, "dp_size": 2}, 1),
        (32, {"tp_size": 16, "nnodes": 2}, 2),
    ],
)
def test_ranks_of_a_machine_share_half_of_its_cores(
    cores: int, ranks: dict[str, int], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert threads(HvdConfig(), **ranks) == wanted


def test_the_setting_decides() -> None:
    assert threads(HvdConfig(planning_threads=3), tp_size=8) == 3
