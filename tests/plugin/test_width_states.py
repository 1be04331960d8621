"""Which widths get backends of their own as a device's memory runs out. That they verify right is
seen on real servers (tests/e2e/test_overlap.py); here the device is made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hvd.plugin import width_states
from sglang_hvd.plugin.width_states import WidthStates

WIDTHS = (1, 4, 8, 16, 32)


class Device:
    """A worker whose target takes some memory for every attention backend that it makes, more for
    wider ones. Prefills and sampling take nothing that counts."""

    device, gpu_id, speculative_num_steps = "cuda", 0, 3

    def __init__(self, free_gb: float, per_node_gb: float) -> None:
        self.free_gb, self.per_node_gb, self.width = free_gb, per_node_gb, 0
        self.server_args = SimpleNamespace(chunked_prefill_size=-1)
        self.model_runner = SimpleNamespace(
            attn_backend="first",
            max_running_requests=1,
            model_config=SimpleNamespace(vocab_size=1),
            decode_cuda_graph_runner=None,
            init_new_workspace=False,
            _get_attention_backend=self._make_backend,
        )
        self.target_worker = self
        self._draft_worker = SimpleNamespace(
            draft_extend_attn_backend=None,
            cuda_graph_runner_for_draft_extend=None,
            stub_draft_extend=lambda batch, result: None,
        )

    def _make_backend(self, *, init_new_workspace: bool) -> str:
        assert init_new_workspace  # a workspace in use by another width must not be written
        self.free_gb -= self.per_node_gb * self.width
        return f"with {self.free_gb} GB left"

    @contextmanager
    def _override_worker_state(self, num_steps: int, width: int) -> Iterator[None]:
        self.width = width
        yield


def states_of(
    monkeypatch: pytest.MonkeyPatch, device: Device, *, are_asked_for: bool
) -> WidthStates:
    def free_gb(*args: Any, **kwargs: Any) -> float:
        return device.free_gb

    monkeypatch.setattr(width_states, "get_available_gpu_memory", free_gb)
    return WidthStates(device, WIDTHS, ranks=None, are_asked_for=are_asked_for)  # type: ignore[arg-type]


def test_the_narrowest_come_first_and_leave_room_for_prefills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 1, 4 and 8 take .125, .5 and 1 GB; 16 would take 2 of the 2.875 that are left.
    device = Device(free_gb=4.5, per_node_gb=0.125)
    states = states_of(monkeypatch, device, are_asked_for=False)
    assert states.widths == (1, 4, 8, 32)
    assert states.memory_gb == {1: 0.12, 4: 0.5, 8: 1.0}
    device = Device(free_gb=4.75, per_node_gb=0.125)
    assert states_of(monkeypatch, device, are_asked_for=False).widths == WIDTHS
    device = Device(free_gb=4.75, per_node_gb=0.125)
    device.server_args.chunked_prefill_size = 2048
    assert states_of(monkeypatch, device, are_asked_for=False).widths == (1, 4, 8, 32)
    device.model_runner.model_config.vocab_size = 2**25  # 4 GB for an array of logits
    assert states_of(monkeypatch, device, are_asked_for=False).widths == (32,)


def test_without_memory_the_widest_serves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_of(monkeypatch, Device(0.9, 0.125), are_asked_for=False)
    assert states.widths == (32,)
    assert states.memory_gb == {}
    states.use(32)


def test_widths_that_were_asked_for_are_all_built(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(free_gb=4.5, per_node_gb=0.125)
    states = states_of(monkeypatch, device, are_asked_for=True)
    assert states.widths == WIDTHS
    states.use(4)
    assert device.model_runner.attn_backend == "with 3.875 GB left"
    states.use(32)
    assert device.model_runner.attn_backend == "first"


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_width_without_memory_ends_the_start_in_one_line(
    monkeypatch: pytest.MonkeyPatch, is_wrapped: bool
) -> None:
    device = Device(free_gb=4.5, per_node_gb=0.125)

    def run_out(*, init_new_workspace: bool) -> str:
        try:
            raise torch.cuda.OutOfMemoryError("no memory")
        except torch.cuda.OutOfMemoryError:
            if not is_wrapped:
                raise
            raise Exception("Capture cuda graph failed")  # noqa: B904  as SGLang does

    device.model_runner._get_attention_backend = run_out
    with pytest.raises(RuntimeError, match="no memory is left for verify width 1: lower"):
        states_of(monkeypatch, device, are_asked_for=True)
