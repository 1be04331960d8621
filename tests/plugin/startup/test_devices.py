"""What a device does not have ends a start before any model loads."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hvd.plugin.startup import devices
from sglang_hvd.plugin.startup.devices import check_device, check_memory_and_gpu

NEUTRAL: dict[str, Any] = {
    **{"device": "cpu", "speculative_draft_attention_backend": None, "enable_torch_compile": False},
    **{"enable_hierarchical_cache": False, "kv_cache_dtype": "auto", "tp_size": 1, "dp_size": 1},
    **{"speculative_draft_kv_cache_dtype": None, "enable_lora": None, "lora_paths": None},
    "speculative_draft_window_size": None,
}


@pytest.fixture(autouse=True)
def one_numa_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "get_cpu_ids_by_node", lambda: ["0,1"])
    monkeypatch.setattr(devices.knobs.runtime, "interpret", False)
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)


@pytest.mark.parametrize("backend", ["torch_native", "intel_amx"])
def test_a_cpu_serves(backend: str) -> None:
    check_device(SimpleNamespace(**NEUTRAL), {backend})
    cfg = SimpleNamespace(**{**NEUTRAL, "speculative_draft_attention_backend": backend})
    check_device(cfg, {backend})


@pytest.mark.parametrize(
    ("changes", "backends", "fault"),
    [
        ({}, {"fa3", "torch_native"}, "attention backend fa3 does not run on a CPU"),
        ({}, {"triton"}, "attention backend triton does not run on a CPU"),
        ({"speculative_draft_attention_backend": "flashinfer"}, {"intel_amx"}, "flashinfer"),
        ({"enable_torch_compile": True}, {"intel_amx"}, "cannot have --enable-torch-compile"),
        ({"enable_hierarchical_cache": True}, {"intel_amx"}, "--enable-hierarchical-cache: drop"),
        ({"enable_lora": True}, {"intel_amx"}, "cannot have --enable-lora"),
        ({"speculative_draft_window_size": 8}, {"intel_amx"}, "-draft-window-size: drop it"),
        ({"lora_paths": {"a": "b"}}, {"intel_amx"}, "cannot have --enable-lora"),
        ({"kv_cache_dtype": "fp8_e5m2"}, {"intel_amx"}, "cannot have --kv-cache-dtype fp8_e5m2"),
        (
            {"tp_size": 2},
            {"intel_amx"},
            "2 ranks need as many NUMA nodes",
        ),
        ({"device": "toaster"}, {"triton"}, "--device toaster: there is no such kind"),
    ],
)
def test_what_it_does_not_have_is_refused(
    changes: dict[str, Any], backends: set[str], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        check_device(SimpleNamespace(**{**NEUTRAL, **changes}), backends)


def test_kernels_run_on_a_cpu_in_tritons_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.knobs.runtime, "interpret", True)
    check_device(SimpleNamespace(**NEUTRAL), {"triton"})


def test_ranks_may_be_told_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    check_device(SimpleNamespace(**{**NEUTRAL, "tp_size": 2}), {"intel_amx"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_gpu_that_is_not_there_is_missed() -> None:
    assert os.environ.get("CUDA_VISIBLE_DEVICES") in (None, "")
    with pytest.raises(ValueError, match="--device cuda: torch finds no GPU"):
        check_memory_and_gpu(SimpleNamespace(device="cuda", mem_fraction_static=0.8))


@pytest.mark.parametrize(("share", "is_refused"), [(None, False), (0.01, False), (-0.04, True)])
def test_a_share_of_memory_is_above_nothing(share: float | None, is_refused: bool) -> None:
    cfg = SimpleNamespace(device="cpu", mem_fraction_static=share)
    if is_refused:
        with pytest.raises(ValueError, match=r"SGLang leaves a share of -0\.04 of the memory"):
            check_memory_and_gpu(cfg)
    else:
        check_memory_and_gpu(cfg)
