"""FlashInfer's plans from the host's lengths: which graphs get them, and what they make of a mask.

That verifications by them give the same output is seen on a GPU only (benchmarks/gpu_check).
"""

from __future__ import annotations

import inspect
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.layers.attention.flashinfer_backend import (
    FlashInferAttnBackend,
    WrapperDispatch,
    fast_prefill_plan,
)

from sglang_hvd.plugin.device import flashinfer_plans
from sglang_hvd.plugin.device.flashinfer_plans import (
    PlanFence,
    plan_drafts_on_host,
    plan_verifications_on_host,
)
from tests.e2e.forked_server import Nursery
from tests.triton_interpreter import assert_passes_interpreted

VERIFY = "SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN"
DRAFT = "SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR"


class _Wrapper:
    """A captured graph's, of which only the way to its plan is looked at."""

    def begin_forward(self) -> None:
        raise AssertionError("FlashInfer's own plan")


@pytest.fixture(autouse=True)
def _as_sglang_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VERIFY, DRAFT):
        monkeypatch.delenv(name, raising=False)


def _backend(**different: Any) -> FlashInferAttnBackend:
    """As after a capture of batches of 1 and 4 requests."""
    backend = object.__new__(FlashInferAttnBackend)
    backend.prefill_backend = "fa2"
    backend.dispatch_reason = None
    backend.flashinfer_kv_cache_dtype = torch.bfloat16
    backend.prefill_cuda_graph_metadata = {1: [_Wrapper()], 4: [_Wrapper()]}
    for name, value in different.items():
        setattr(backend, name, value)
    return backend


def _is_on_host(backend: FlashInferAttnBackend) -> list[bool]:
    return [
        isinstance(wrapper.begin_forward, partial)
        and wrapper.begin_forward.func is fast_prefill_plan  # by which SGLang knows it
        and wrapper.begin_forward.args == (wrapper,)
        for wrappers in backend.prefill_cuda_graph_metadata.values()
        for wrapper in wrappers
    ]


def test_all_captured_verifications_are_planned_on_the_host() -> None:
    backend = _backend()
    assert plan_verifications_on_host(backend)
    assert _is_on_host(backend) == [True, True]


@pytest.mark.parametrize(
    "different",
    [
        {"prefill_backend": "fa3"},
        {"dispatch_reason": WrapperDispatch.SLIDING_WINDOW},
        {"dispatch_reason": WrapperDispatch.CROSS_ATTENTION},
        {"flashinfer_kv_cache_dtype": torch.uint8},  # FP4
    ],
)
def test_others_are_left_to_flashinfer(different: dict[str, Any]) -> None:
    backend = _backend(**different)
    assert not plan_verifications_on_host(backend)
    assert _is_on_host(backend) == [False, False]


def test_without_graphs_there_are_none() -> None:
    assert not plan_verifications_on_host(_backend(prefill_cuda_graph_metadata={}))


def test_other_backends_have_none() -> None:
    class Derived(FlashInferAttnBackend):
        """Might plan otherwise."""

    assert not plan_verifications_on_host(object())
    assert not plan_verifications_on_host(object.__new__(Derived))


def test_sglangs_variables_switch_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VERIFY, "0")
    monkeypatch.setenv(DRAFT, "0")
    backend = _backend()
    assert not plan_verifications_on_host(backend)
    assert _is_on_host(backend) == [False, False]
    plan_drafts_on_host()
    assert not envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR.get()


def test_plans_that_sglang_would_replay_are_not_made_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    monkeypatch.setenv(VERIFY, "1")
    backend = _backend()
    assert not plan_verifications_on_host(backend)
    assert _is_on_host(backend) == [False, False]


def test_drafts_are_planned_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # which SGLang's variable writes to
    assert not envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR.get()
    plan_drafts_on_host()
    assert envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR.get()


def test_a_fence_is_waited_for_where_flashinfer_plans_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    class Event:
        """What is done with torch.cuda.Event."""

        def synchronize(self) -> None:
            done.append("wait")

        def record(self) -> None:
            done.append("record")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    for device, target, drafter in (
        ("cuda", ("flashinfer", "triton"), None),
        ("cuda", ("fa3", "fa3"), "flashinfer"),
        ("cuda", ("fa3", "fa3"), None),
        ("cpu", ("flashinfer", "flashinfer"), None),
    ):
        spec = SimpleNamespace(speculative_draft_attention_backend=drafter)
        monkeypatch.setattr(flashinfer_plans, "attention_backends", lambda target=target: target)
        monkeypatch.setattr(flashinfer_plans, "get_spec", lambda spec=spec: spec)
        fence = PlanFence.of(device)
        fence.record()
        fence.wait()
    assert done == 2 * ["record", "wait"]


def test_sglang_plans_so() -> None:
    """The lines of SGLang on which it rests, none of which a CPU runs."""
    source = inspect.getsource(flashinfer_backend.FlashInferIndicesUpdaterPrefill)
    assert "wrapper_paged.begin_forward.func is fast_prefill_plan" in source
    assert 'paged_plan_kwargs["uniform_verify_width"] = num_tokens_per_req' in source
    draft = inspect.getsource(flashinfer_backend.FlashInferMultiStepDraftBackend)
    assert "envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR.get()" in draft


def test_masks_are_packed_as_flashinfer_packs_them(nursery: Nursery, tmp_path: Path) -> None:
    assert_passes_interpreted(
        Path(__file__).with_name("flashinfer_plan_twins.py"), nursery, tmp_path
    )
