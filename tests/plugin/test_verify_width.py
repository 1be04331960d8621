"""How wide a server verifies that was not told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin.algorithm import _verify_width


def width(
    *, tree: int = 16, device: str = "cuda", max_running_requests: int = 48, **settings: Any
) -> int:
    cfg = SimpleNamespace(device=device, max_running_requests=max_running_requests)
    return _verify_width(HvdConfig(**settings), tree, cfg)


def test_few_requests_verify_more_where_it_is_weighed() -> None:
    assert width(max_running_requests=16) == 64
    assert width(max_running_requests=17) == width() == 32
    assert width(max_running_requests=1, device="cpu") == 32
    assert width(max_running_requests=1, policy="payoff") == 32
    assert width(max_running_requests=1, max_draft_tokens=20) == 21
    assert width(max_running_requests=1, verify_width=24) == 24


def test_the_model_drafters_tree_always_fits() -> None:
    assert width(tree=60) == width(tree=60, policy="payoff") == width(tree=60, policy="model") == 60
    assert width(policy="model") == 16
    with pytest.raises(ValueError, match="narrower than the model drafter's tree of 60 nodes"):
        width(tree=60, verify_width=32)


def test_both_drafts_of_a_request_have_room() -> None:
    assert width(policy="both") == 32
    assert width(tree=32, policy="both") == 40
    assert width(tree=32, policy="both", verify_width=33) == 33
    with pytest.raises(ValueError, match="no room for a cache draft beside"):
        width(tree=32, policy="both", verify_width=32)
