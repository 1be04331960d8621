"""The verify widths that a server has where none are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin.algorithm import _narrow_widths


def widths_of(config: HvdConfig, *, is_any_width: bool = False, **settings: Any) -> tuple[int, ...]:
    """With 32 nodes at most, on a server that serves 16 requests at once."""
    cfg = {"max_running_requests": 16, "enable_lora": False, "lora_paths": None, **settings}
    return _narrow_widths(config, 32, SimpleNamespace(**cfg), is_any_width)


def test_on_a_gpu_they_follow_the_number_of_requests() -> None:
    assert widths_of(HvdConfig()) == (4, 8, 16)
    assert widths_of(HvdConfig(), max_running_requests=1) == ()
    assert widths_of(HvdConfig(), max_running_requests=256) == (1, 2, 4, 8, 16)


@pytest.mark.parametrize("settings", [{"enable_lora": True}, {"lora_paths": ["adapter"]}])
def test_with_lora_a_gpu_has_none(settings: dict[str, Any]) -> None:
    assert widths_of(HvdConfig(), **settings) == ()
    with pytest.raises(ValueError, match="with LoRA on this device"):
        widths_of(HvdConfig(narrow_widths=(4,)), **settings)


def test_other_policies_have_those_that_are_asked_for() -> None:
    assert widths_of(HvdConfig(policy="payoff")) == ()
    assert widths_of(HvdConfig(policy="payoff", narrow_widths=(4, 8))) == (4, 8)
    assert widths_of(HvdConfig(narrow_widths=())) == ()


def test_where_they_cost_nothing_there_are_all_powers_of_two() -> None:
    for config in (HvdConfig(), HvdConfig(policy="cache")):
        assert widths_of(config, is_any_width=True, enable_lora=True) == (1, 2, 4, 8, 16)


def test_none_is_as_wide_as_the_widest() -> None:
    with pytest.raises(ValueError, match="must stay below the verify width 32"):
        widths_of(HvdConfig(narrow_widths=(4, 32)))
