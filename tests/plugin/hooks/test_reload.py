"""Another predictor on its way from a client's request to the drafter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client import REGISTRY
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import (
    DumperControlReqInput,
    UpdateWeightFromDiskReqInput,
    msgpack_decode,
    msgpack_encode,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from sglang_hvd.allocation import VerifyWidths
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.engine.served_predictor import ServedPredictor
from sglang_hvd.plugin.engine.worker import HvdWorker
from sglang_hvd.plugin.hooks.reload import answer_order, ask_schedulers
from sglang_hvd.plugin.requests.metrics import PredictorMetrics
from sglang_hvd.plugin.startup.attention_support import TargetAttention
from sglang_hvd.plugin.startup.launch import HvdLaunch
from sglang_hvd.replay.core.single_cycles import VerifyOutcome, outcome_batch
from tests.e2e.forked_server import Nursery
from tests.payoff.made_up import constant_survival
from tests.plugin.two_ranks import found_by_ranks, run_as_rank

PROMPT = [*range(1, 18), 0, 1, 2]


def save_predictor(path: Path, prob: float) -> Path:
    """One by which every token is accepted with this probability, if those before it are."""
    constant_survival(prob).save(path)
    return path


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return save_predictor(tmp_path / "first.safetensors", 0.99)


@pytest.fixture
def second(tmp_path: Path) -> Path:
    return save_predictor(tmp_path / "second.safetensors", 0.5)


def drafter_of(predictor: Path, **settings: Any) -> HybridDrafter:
    return HybridDrafter.from_config(
        HvdConfig(policy="payoff", predictor=predictor, **settings),
        token_strings="abcdefghijklmnopqrst",
        num_model_steps=3,
        num_model_nodes=3,
        verify_width=32,
        deterministic=True,
    )


def served(predictor: Path, *, metrics: PredictorMetrics | None = None) -> ServedPredictor:
    return ServedPredictor(
        drafter_of(predictor),
        HvdConfig(policy="payoff", predictor=predictor),
        ranks=RankGroup(),
        metrics=metrics,
    )


def scheduler_of(predictor: ServedPredictor | None) -> Scheduler:
    """One that can answer and no more; None: it serves without HVD."""
    scheduler = object.__new__(Scheduler)
    scheduler.draft_worker = None
    scheduler.server_args = SimpleNamespace()
    if predictor is not None:
        scheduler.server_args = SimpleNamespace(_hvd_launch="a launch")
        scheduler.draft_worker = object.__new__(HvdWorker)
        scheduler.draft_worker._served_predictor = predictor
    return scheduler


def ask(path: Path, *schedulers: Scheduler) -> tuple[bool, str, Any]:
    """Through SGLang's own methods, with its own encoding; one scheduler of each group."""
    load_plugins()
    manager = object.__new__(TokenizerManager)
    manager.event_loop = manager  # the answers need no loop to arrive

    def send(request: Any) -> None:
        for scheduler in schedulers:
            answer = scheduler.handle_dumper_control(msgpack_decode(msgpack_encode(request)))
            # After this call has returned, as answers do.
            asyncio.get_running_loop().call_soon(
                manager.dumper_control_communicator.handle_recv,
                msgpack_decode(msgpack_encode(answer)),
            )

    manager.dumper_control_communicator = FanOutCommunicator(send, len(schedulers))
    request = UpdateWeightFromDiskReqInput(model_path=str(path), load_format="hvd_predictor")
    return asyncio.run(manager.update_weights_from_disk(request, None))


def test_a_client_gets_its_predictor(first: Path, second: Path) -> None:
    predictor = served(first)
    before = predictor.describe()
    assert ask(second, scheduler_of(predictor)) == (True, f"the predictor is {second}", 0)
    after = predictor.describe()
    assert before is not None
    assert after is not None
    assert (before["file"], after["file"]) == (str(first), str(second))
    assert after["fingerprint"] == AcceptancePredictor.load(second).fingerprint
    assert before["fingerprint"] != after["fingerprint"]


def test_a_client_gets_the_reason_of_a_refusal(first: Path, second: Path) -> None:
    predictor = served(first)
    before = predictor.describe()
    second.write_bytes(second.read_bytes()[:-1])
    is_loaded, message, _ = ask(second, scheduler_of(predictor))
    assert not is_loaded
    assert f"predictor {second} is corrupt or truncated" in message
    assert "\n" not in message
    assert predictor.describe() == before


def test_all_data_parallel_groups_must_take_it(first: Path, second: Path) -> None:
    predictors = [served(first), served(first)]
    assert ask(second, *map(scheduler_of, predictors))[0]
    assert [p.describe()["file"] for p in predictors] == [str(second)] * 2  # type: ignore[index]
    is_loaded, message, _ = ask(second, scheduler_of(predictors[0]), scheduler_of(None))
    assert (is_loaded, message) == (False, "this server does not run HVD")


def test_other_weight_updates_are_sglangs() -> None:
    async def load(manager: Any, obj: Any, request: Any) -> tuple[bool, str, int]:
        return True, f"weights {obj.model_path} {request}", 3

    manager = object.__new__(TokenizerManager)
    obj = UpdateWeightFromDiskReqInput(model_path="m", load_format="auto")
    for is_hvd in (False, True):
        manager.server_args = SimpleNamespace(**({"_hvd_launch": "a launch"} if is_hvd else {}))
        answer = asyncio.run(ask_schedulers(load, manager, obj, "request"))
        assert answer == (True, "weights m request", 3)
    unknown = UpdateWeightFromDiskReqInput(model_path="m", load_format="x")
    is_loaded, message, _ = asyncio.run(ask_schedulers(load, manager, unknown, "request"))
    assert not is_loaded
    assert message.startswith("there is no load_format 'x': give one of auto, pt, ")


OF_WIDTHS = (
    "HVD cannot recapture graphs of several verify widths: start with --hvd-set narrow_widths=[] "
    "and without --hvd-set wide_width"
)
OF_PLANS = (
    "HVD cannot recapture graphs with FlashInfer, because it makes FlashInfer's plans on the host: "
    "leave out recapture_cuda_graph, or start with SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN=0 or "
    "another attention backend"
)


@pytest.mark.parametrize(
    ("backend", "has_width_states", "host_plan", "fault"),
    [
        ("triton", True, None, OF_WIDTHS),
        ("triton", False, None, None),
        ("flashinfer", True, None, OF_WIDTHS),
        ("flashinfer", False, None, OF_PLANS),
        ("flashinfer", False, "1", OF_PLANS),
        ("flashinfer", False, "0", None),
    ],
)
def test_graphs_of_several_widths_or_with_host_plans_are_not_recaptured(
    backend: str,
    has_width_states: bool,
    host_plan: str | None,
    fault: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def load(manager: Any, obj: Any) -> tuple[bool, str, int]:
        return True, "recaptured", 3

    monkeypatch.delenv("SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN", raising=False)
    if host_plan is not None:
        monkeypatch.setenv("SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN", host_plan)
    manager = object.__new__(TokenizerManager)
    manager.server_args = ServerArgs(model_path="none")
    manager.server_args._hvd_launch = HvdLaunch(
        HvdConfig(),
        16,
        VerifyWidths((4, 32), base=32),
        has_width_states,
        attention=TargetAttention(backends=frozenset({backend})),
    )
    obj = UpdateWeightFromDiskReqInput(model_path="m", recapture_cuda_graph=True)
    answer = asyncio.run(ask_schedulers(load, manager, obj))
    assert answer == ((True, "recaptured", 3) if fault is None else (False, fault, 0))


def test_other_requests_of_the_dumper_are_sglangs() -> None:
    scheduler, request = scheduler_of(None), DumperControlReqInput(method="dump", body={})
    asked: list[Any] = []
    answer = answer_order(lambda *given: asked.extend(given), scheduler, request)
    assert answer is None
    assert asked == [scheduler, request]


def test_the_calibration_is_described_and_published(first: Path, second: Path) -> None:
    metrics = PredictorMetrics()
    drafter = drafter_of(first, threshold=1.0)
    predictor = ServedPredictor(
        drafter,
        HvdConfig(policy="payoff", predictor=first, threshold=1.0),
        ranks=RankGroup(),
        metrics=metrics,
    )
    for rid in range(3):
        drafter.start(rid, PROMPT)
        drafter.extend(rid, [3])
        drafter.plan([rid])
        drafter.commit([rid], outcome_batch([VerifyOutcome([4, 5, 6, 0], 3)]))
    for rid in range(3, 7):  # the cache proposes nothing
        drafter.start(rid, [rid])
        drafter.plan([rid])
        drafter.commit([rid], outcome_batch([VerifyOutcome([8, 9], 1)]))
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(predictor.describe()))  # as it travels
    of_prompt = state["calibration"]["prompt"]
    assert of_prompt["num_verified"] == 3
    assert of_prompt["mean_accepted"] == pytest.approx(3)
    assert of_prompt["shift"] < 0
    assert len(of_prompt["bins"]) == 10
    assert of_prompt["bins"][9]["share"] == 1
    assert not of_prompt["is_fallback"]
    assert state["calibration"]["shared"]["mean_accepted"] is None
    of_model = state["model_drafter"]
    assert (of_model["num_verified"], of_model["mean_accepted"]) == (4, 1)
    assert of_model["mean_predicted"] > 1

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"sglang:hvd_{name}", labels)

    predictor.publish()
    fingerprint = state["fingerprint"]
    assert value("verified_cache_drafts_total", origin="prompt") == 3
    assert value("accepted_len", origin="prompt") == pytest.approx(3)
    assert value("predicted_len", origin="prompt") == pytest.approx(of_prompt["mean_predicted"])
    assert value("shift", origin="prompt") == of_prompt["shift"]
    assert value("fallback", origin="prompt") == 0
    assert value("reliability_share", origin="prompt", bin="9") == 1
    assert np.isnan(value("accepted_len", origin="shared"))  # type: ignore[arg-type]
    assert value("model_accepted_len") == 1
    assert value("model_predicted_len") == of_model["mean_predicted"]
    assert value("predictor", fingerprint=fingerprint) == 1
    predictor.replace(second)
    predictor.publish()
    assert value("predictor", fingerprint=fingerprint) == 0
    assert value("predictor", fingerprint=AcceptancePredictor.load(second).fingerprint) == 1
    assert value("verified_cache_drafts_total", origin="prompt") == 3  # counters only grow


def _replace_as_rank(folder: Path, rank: int, ranks: RankGroup) -> object:
    first = folder / "first.safetensors"
    predictor = ServedPredictor(
        drafter_of(first),
        HvdConfig(policy="payoff", predictor=first),
        ranks=ranks,
        metrics=None,
    )
    found: dict[str, tuple[str, str]] = {}
    for name in ("missing on one", "other on one", "same"):
        try:
            predictor.replace(folder / f"{name}-{rank}")
            message = ""
        except ValueError as error:
            message = str(error)
        state = predictor.describe()
        assert state is not None
        found[name] = (message, state["fingerprint"])
    return found


def test_ranks_replace_alike_or_not_at_all(first: Path, tmp_path: Path, nursery: Nursery) -> None:
    for name, prob in (
        *(("missing on one-0", 0.1), ("other on one-0", 0.1), ("other on one-1", 0.2)),
        *(("same-0", 0.3), ("same-1", 0.3)),
    ):
        save_predictor(tmp_path / name, prob)
    found = found_by_ranks("tests.plugin.hooks.test_reload", tmp_path, nursery)
    old = AcceptancePredictor.load(first).fingerprint
    for name in ("missing on one", "other on one", "same"):
        assert found[0][name][1] == found[1][name][1]
        assert (found[0][name][1] == old) == (name != "same")
    for rank in range(2):
        assert "missing on one-1 is not a file" in found[rank]["missing on one"][0]
        assert "is not the same on all ranks" in found[rank]["other on one"][0]
        assert found[rank]["same"][0] == ""


if __name__ == "__main__":  # a rank
    run_as_rank(_replace_as_rank)
