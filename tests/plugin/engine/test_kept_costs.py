"""Which server a kept table of costs is of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups.fields.exec_ import ExecComm, ExecDeterministic, ExecKernel, ExecMoe

from sglang_hvd.allocation import DraftExtend, VerifyWidths
from sglang_hvd.costs import StepCosts
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.engine import kept_costs
from sglang_hvd.plugin.engine.states.step_states import StepStates


def _runner(dtype: str = "bfloat16") -> SimpleNamespace:
    config = {"hidden_size": 64}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: dict(config)), quantization=None
        ),
        dtype=dtype,
        kv_cache_dtype=dtype,
        lora_manager=None,
        prefill_attention_backend_str="fa3",
        decode_attention_backend_str="flashinfer",
        page_size=1,
        decode_cuda_graph_runner=SimpleNamespace(capture_bs=[1, 2]),
    )


def _set(path: str, value: object) -> Callable[[Any], None]:
    """Sets an attribute, some way down."""

    def change(of: Any) -> None:
        *places, name = path.split(".")
        for place in places:
            of = getattr(of, place)
        setattr(of, name, value)

    return change


def _settings() -> SimpleNamespace:
    """SGLang's resolved settings of how it computes."""
    kinds = [("kernel", ExecKernel), ("moe", ExecMoe), ("comm", ExecComm)]
    kinds += [("deterministic", ExecDeterministic)]
    of_kind = {
        kind: SimpleNamespace(**dict.fromkeys(names.__struct_fields__)) for kind, names in kinds
    }
    return SimpleNamespace(**of_kind, graph=SimpleNamespace(enable_torch_compile=False))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a server resolved."""
    server = SimpleNamespace(
        parallel=SimpleNamespace(tp_size=1, moe_ep_size=1, nnodes=1),
        spec=SimpleNamespace(
            speculative_attention_mode="prefill", speculative_moe_runner_backend="auto"
        ),
        settings=_settings(),
    )
    monkeypatch.setattr(kept_costs, "get_parallel", lambda: server.parallel)
    monkeypatch.setattr(kept_costs, "get_spec", lambda: server.spec)
    monkeypatch.setattr(kept_costs, "get_exec", lambda: server.settings)
    return server


@pytest.fixture
def draft_worker() -> SimpleNamespace:
    return SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=_runner()), draft_runner=_runner(), device="cpu"
    )


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
        # A pair of backends has one class, whichever they are.
        _set("target_worker.model_runner.prefill_attention_backend_str", "triton"),
        _set("target_worker.model_runner.decode_attention_backend_str", "triton"),
        _set("draft_runner.prefill_attention_backend_str", "fa4"),
        _set("draft_runner.decode_attention_backend_str", "fa4"),
        _set("target_worker.model_runner.page_size", 64),
        _set("target_worker.model_runner.decode_cuda_graph_runner", None),
        _set("target_worker.model_runner.decode_cuda_graph_runner.capture_bs", [1]),
        _set("device", "other"),
    ],
)
def test_a_table_is_of_one_server(
    change: Callable[[Any], None], server: SimpleNamespace, draft_worker: SimpleNamespace
) -> None:
    steps = [[1, 2], 3]
    key = kept_costs._key(draft_worker, steps)
    assert kept_costs._key(draft_worker, steps) == key
    assert kept_costs._key(draft_worker, [[1, 2], 4]) != key
    other = copy.deepcopy(draft_worker)
    change(other)
    assert kept_costs._key(other, steps) != key


@pytest.mark.parametrize(
    "change",
    [
        _set("parallel.tp_size", 2),
        _set("parallel.moe_ep_size", 2),
        _set("parallel.nnodes", 2),
        # Which one of a pair of backends verifies.
        _set("spec.speculative_attention_mode", "decode"),
        _set("spec.speculative_moe_runner_backend", "triton"),
        _set("settings.kernel.fp8_gemm_runner_backend", "triton"),
        _set("settings.moe.moe_runner_backend", "triton"),
        _set("settings.comm.disable_custom_all_reduce", True),
        _set("settings.deterministic.enable_deterministic_inference", True),
        _set("settings.graph.enable_torch_compile", True),
    ],
)
def test_a_table_is_of_one_way_to_compute(
    change: Callable[[Any], None], server: SimpleNamespace, draft_worker: SimpleNamespace
) -> None:
    key = kept_costs._key(draft_worker, [])
    change(server)
    assert kept_costs._key(draft_worker, []) != key


@pytest.fixture
def kept_in(
    server: SimpleNamespace, draft_worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., StepCosts]:
    """A start whose profile is assumed, with this folder of kept tables."""
    costs = StepCosts.assumed((1, 2))
    profile = SimpleNamespace(table=lambda max_requests: costs)
    monkeypatch.setattr(kept_costs, "CostProfile", lambda *args, **kwargs: profile)
    draft_worker.topk = 1
    of_draft_steps: Any = SimpleNamespace(num_steps=(1,))

    def start(folder: Path, *, has_host_plans: bool = True) -> StepCosts:
        return kept_costs.profiled_costs(
            draft_worker,
            StepStates(VerifyWidths((1, 2), base=2), None, of_draft_steps, has_host_plans),
            model_tree_width=2,
            draft_extend=DraftExtend.EVERY_STEP,
            use_kept=True,
            folder=folder,
            max_requests=2,
            ranks=RankGroup(),
        )

    return start


def test_a_table_is_of_who_plans_verifications(
    kept_in: Callable[..., StepCosts], tmp_path: Path
) -> None:
    # FlashInfer's own plans wait for the device, within what is timed.
    for num_tables, has_host_plans in ((1, True), (1, True), (2, False)):
        kept_in(tmp_path, has_host_plans=has_host_plans)
        assert len(list(tmp_path.iterdir())) == num_tables


def test_a_folder_that_cannot_be_looked_into_is_reported(
    kept_in: Callable[..., StepCosts], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The system refuses this name to every user, as it refuses another user's home.
    costs = kept_in(tmp_path / ("costs" * 100))
    assert costs.widths == (1, 2)
    assert "cannot keep the table of costs" in caplog.text
