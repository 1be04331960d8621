"""Where requests end that name no limit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_hvd.plugin import context_room


@pytest.mark.parametrize(
    ("num_prompt_tokens", "asked_for", "limit"),
    [(300, 2**30, 132), (300, 132, 132), (300, 100, 100), (432, 2**30, 0), (500, 2**30, 0)],
)
def test_a_request_leaves_room_for_a_verification(
    num_prompt_tokens: int, asked_for: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_room, "compute_num_reserved_tokens", lambda: 80)
    scheduler = SimpleNamespace(server_args=None, model_config=SimpleNamespace(context_len=512))
    req = SimpleNamespace(
        origin_input_ids=[0] * num_prompt_tokens,
        sampling_params=SimpleNamespace(max_new_tokens=asked_for),
    )
    monkeypatch.setattr(context_room, "launch_of", lambda args: None)
    context_room.limit_new_tokens(None, scheduler, req)
    assert req.sampling_params.max_new_tokens == asked_for  # not a server of HVD
    monkeypatch.setattr(context_room, "launch_of", lambda args: "a launch")
    context_room.limit_new_tokens(None, scheduler, req)
    assert req.sampling_params.max_new_tokens == limit
