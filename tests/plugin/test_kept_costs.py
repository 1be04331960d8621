"""Which server a kept table of costs is of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hvd.plugin import kept_costs


def _runner(dtype: str = "bfloat16") -> SimpleNamespace:
    config = {"hidden_size": 64}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: dict(config)), quantization=None
        ),
        dtype=dtype,
        kv_cache_dtype=dtype,
        lora_manager=None,
        attn_backend=object(),
        decode_cuda_graph_runner=SimpleNamespace(capture_bs=[1, 2]),
    )


def _set(path: str, value: object) -> Callable[[Any], None]:
    """Sets an attribute of a draft worker, some way down."""

    def change(draft_worker: Any) -> None:
        *places, name = path.split(".")
        for place in places:
            draft_worker = getattr(draft_worker, place)
        setattr(draft_worker, name, value)

    return change


OTHER_MODEL = SimpleNamespace(to_dict=lambda: {"hidden_size": 128})


@pytest.mark.parametrize(
    "change",
    [
        _set("target_worker.model_runner.model_config.hf_config", OTHER_MODEL),
        _set("draft_runner.model_config.hf_config", OTHER_MODEL),
        _set("target_worker.model_runner.model_config.quantization", "fp8"),
        _set("draft_runner.model_config.quantization", "fp8"),
        _set("target_worker.model_runner.dtype", "float16"),
        _set("draft_runner.dtype", "float16"),
        _set("target_worker.model_runner.kv_cache_dtype", "float8_e4m3fn"),
        _set("target_worker.model_runner.lora_manager", "some"),
        _set("target_worker.model_runner.attn_backend", "a string"),
        _set("target_worker.model_runner.decode_cuda_graph_runner", None),
        _set("target_worker.model_runner.decode_cuda_graph_runner.capture_bs", [1]),
        _set("device", "other"),
    ],
)
def test_a_table_is_of_one_server(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_costs, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    draft_worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=_runner()), draft_runner=_runner(), device="cpu"
    )
    steps = [[1, 2], 3]
    key = kept_costs._key(draft_worker, steps)
    assert kept_costs._key(draft_worker, steps) == key
    assert kept_costs._key(draft_worker, [[1, 2], 4]) != key
    other = copy.deepcopy(draft_worker)
    change(other)
    assert kept_costs._key(other, steps) != key
    monkeypatch.setattr(kept_costs, "get_parallel", lambda: SimpleNamespace(tp_size=2))
    assert kept_costs._key(draft_worker, steps) != key
