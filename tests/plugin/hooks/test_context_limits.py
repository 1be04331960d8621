"""The whole context is usable, and what has a place for each of its tokens has some for drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_hvd.plugin.device import context_room
from sglang_hvd.plugin.hooks import context_limits
from sglang_hvd.plugin.startup.launch import launch_of


@pytest.fixture
def server_args(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The arguments of a server that does not run HVD yet, and takes 80 slots ahead."""
    server_args = SimpleNamespace(_hvd_launch=None)
    monkeypatch.setattr(context_limits, "served_launch", lambda: launch_of(server_args))
    monkeypatch.setattr(context_room, "get_alloc_reserve_per_decode", lambda: 80)
    monkeypatch.setattr(context_room, "get_alloc_page_size", lambda: 1)
    return server_args


@pytest.mark.parametrize(
    ("page_size", "columns", "wanted"), [(1, 36, 80), (1, 100, 100), (16, 36, 95)]
)
def test_a_row_holds_what_is_taken_ahead(
    page_size: int,
    columns: int,
    wanted: int,
    server_args: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context_room, "get_alloc_page_size", lambda: page_size)
    assert context_limits.hold_slots_ahead(lambda: columns) == columns  # not a server of HVD
    server_args._hvd_launch = "a launch"
    assert context_limits.hold_slots_ahead(lambda: columns) == wanted


def test_requests_may_ask_for_the_whole_context(server_args: SimpleNamespace) -> None:
    assert context_limits.reserve_nothing(lambda: 32) == 32  # not a server of HVD
    server_args._hvd_launch = "a launch"
    assert context_limits.reserve_nothing(lambda: 32) == 0


class _Embedding(torch.nn.Module):
    cos_sin_cache = torch.zeros(1)
    needed = 0

    def _ensure_cos_sin_cache_length(self, needed_max_pos: int) -> None:
        self.needed = needed_max_pos


def test_attention_and_positions_reach_as_far_as_a_row(server_args: SimpleNamespace) -> None:
    embedding, other = _Embedding(), torch.nn.Linear(1, 1)
    runner = SimpleNamespace(
        server_args=server_args,
        model_config=SimpleNamespace(context_len=512),
        model=torch.nn.Sequential(torch.nn.Sequential(embedding), other),
    )
    seen: list[int] = []
    for launch in (None, "a launch"):
        server_args._hvd_launch = launch
        context_limits.hold_positions_ahead(
            lambda runner: seen.append(runner.model_config.context_len), runner
        )
    assert seen == [512, 592]
    assert embedding.needed == 591
    assert runner.model_config.context_len == 512  # requests end where they did
