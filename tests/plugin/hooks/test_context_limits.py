"""Where requests end that name no limit, and what a row of KV slots has room for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_hvd.plugin.hooks import context_limits


@pytest.mark.parametrize(
    ("page_size", "columns", "wanted"), [(1, 36, 80), (1, 100, 100), (16, 36, 95)]
)
def test_a_row_holds_what_is_taken_ahead(
    page_size: int, columns: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_args = SimpleNamespace(_hvd_launch=None)
    monkeypatch.setattr(
        context_limits, "get_context", lambda: SimpleNamespace(server_args=server_args)
    )
    monkeypatch.setattr(context_limits, "get_alloc_reserve_per_decode", lambda: 80)
    monkeypatch.setattr(context_limits, "get_alloc_page_size", lambda: page_size)
    assert context_limits.hold_slots_ahead(lambda: columns) == columns  # not a server of HVD
    server_args._hvd_launch = "a launch"
    assert context_limits.hold_slots_ahead(lambda: columns) == wanted


@pytest.mark.parametrize(
    ("num_prompt_tokens", "asked_for", "limit"),
    [
        *((300, 2**30, 132), (300, 132, 132), (300, 100, 100), (431, 2**30, 1)),
        *((432, 2**30, 0), (500, 1, 0), (500, 0, 0)),
    ],
)
def test_a_request_leaves_room_for_a_verification(
    num_prompt_tokens: int, asked_for: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_limits, "compute_num_reserved_tokens", lambda: 80)
    scheduler = SimpleNamespace(server_args=None, model_config=SimpleNamespace(context_len=512))
    faults: list[str] = []
    req = SimpleNamespace(
        origin_input_ids=[0] * num_prompt_tokens,
        sampling_params=SimpleNamespace(max_new_tokens=asked_for),
        set_finish_with_abort=faults.append,
    )
    monkeypatch.setattr(context_limits, "launch_of", lambda args: None)
    context_limits.limit_new_tokens(None, scheduler, req)
    assert req.sampling_params.max_new_tokens == asked_for  # not a server of HVD
    monkeypatch.setattr(context_limits, "launch_of", lambda args: "a launch")
    context_limits.limit_new_tokens(None, scheduler, req)
    assert req.sampling_params.max_new_tokens == limit
    if limit == 0 < asked_for:
        [fault] = faults
        assert f"The prompt has {num_prompt_tokens} tokens" in fault
        assert "of the context of 512 tokens, 80 are reserved for drafts" in fault
        assert "Shorten it to 431 tokens" in fault
    else:
        assert not faults
