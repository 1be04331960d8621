"""The order of what a decode step does. Recording stand-ins take the place of its parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_hvd.allocation import DraftExtend, VerifyWidths
from sglang_hvd.plugin.engine import worker as worker_module
from sglang_hvd.plugin.engine.catch_up import Due
from sglang_hvd.plugin.engine.worker import HvdWorker
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.plugin.requests.step_planner import StepPlanner
from sglang_hvd.step_clock import StepClock
from sglang_hvd.types import DraftPlans

NOBODY = Due()
VERIFY_INPUT: Any = SimpleNamespace(is_model_node=None, kv_loc_plan="a window")
RESULT = SimpleNamespace(next_token_ids="tokens", accept_lens="lengths", new_seq_lens="new")

PLAN = [
    *("launched.commit", "held.of_step", "drafter.plan", "drafter.lengths"),
    "launched.num_plain_with",
]
SEND = ["catch_up.due", "step_drafts.arrays", "send", "drafting", "catch_up.store"]
CATCH_UP = ["states.use_base_width", "catch_up.run"]
DRAFT_AND_VERIFY = [
    *("states.use_width", "step_drafts.draft", "step_drafts.lay_out", "not drafting"),
    *("verifications.run", "launched.record_verify", "on_publish"),
]
EXTEND = [
    *("drafting", "extend_fence.wait", "costs.time_extend", "draft_worker.extend"),
    *("extend_fence.record", "not drafting"),
]
POSTPONE = ["drafting", "stub_skipped_draft_extend", "catch_up.keep", "not drafting"]


class Part:
    """Records the names of the methods that are called, and returns what it is told to."""

    def __init__(self, name: str, calls: list[str], **results: Any) -> None:
        self._name, self._calls, self._results = name, calls, results

    def __getattr__(self, method: str) -> Any:
        def call(*_args: Any, **_options: Any) -> Any:
            self._calls.append(f"{self._name}.{method}")
            return self._results.get(method)

        return call


def decode(
    patch: pytest.MonkeyPatch,
    *,
    ahead: StepPlan | None = None,
    due: Due = NOBODY,
    draft_extend: DraftExtend = DraftExtend.EVERY_STEP,
) -> tuple[list[str], Any]:
    """Runs one step of one request. Returns the calls, and the batch after it."""
    calls: list[str] = []

    @contextlib.contextmanager
    def drafting(_draft_worker: Any) -> Iterator[None]:
        calls.append("drafting")
        yield
        calls.append("not drafting")

    def send(arrays: dict[str, Any], _device: str) -> dict[str, Any]:
        calls.append("send")
        return arrays

    patch.setattr(worker_module, "drafting", drafting)
    patch.setattr(worker_module, "all_to_device", send)
    worker: Any = HvdWorker.__new__(HvdWorker)
    worker.device = "cpu"
    worker._clock = StepClock()
    launched: Any = Part("launched", calls, num_plain_with=1)
    requests = SimpleNamespace(keys=[7], reporting_rows=[])
    held: Any = Part("held", calls, of_step=requests)
    drafter: Any = Part("drafter", calls, plan=DraftPlans.plain(1), lengths=np.array([11]))
    worker._launched = launched
    worker._node_sampler = SimpleNamespace(sample=lambda *_: None, arrays=lambda *_: {})
    worker._planner = StepPlanner(drafter, held, launched, VerifyWidths((1, 4), 4))
    worker._draft_extend = draft_extend
    worker._stub_skipped_draft_extend = lambda *_: calls.append("stub_skipped_draft_extend")
    parts: dict[str, dict[str, Any]] = {
        "catch_up": {"due": due},
        "step_drafts": {"arrays": {}, "lay_out": VERIFY_INPUT},
        "verifications": {"run": RESULT},
        "costs": {"time_extend": contextlib.nullcontext()},
        "states": {},
        "extend_fence": {},
        "draft_worker": {},
    }
    for name, results in parts.items():
        setattr(worker, f"_{name}", Part(name, calls, **results))
    batch: Any = SimpleNamespace(
        reqs=["a request"],
        has_grammar=False,
        return_hidden_states=False,
        seq_lens=torch.tensor([10]),
        seq_lens_cpu=None,
        seq_lens_sum=None,
        spec_info=None,
    )
    result = worker._decode(batch, ahead, lambda _: calls.append("on_publish"), None)
    assert result is RESULT
    assert batch.spec_info is VERIFY_INPUT
    return calls, batch


@pytest.mark.parametrize("due", [NOBODY, Due([0], [1])])
@pytest.mark.parametrize("is_postponed", [False, True])
def test_a_planned_step_commits_plans_sends_drafts_verifies_and_extends(
    monkeypatch: pytest.MonkeyPatch, due: Due, is_postponed: bool
) -> None:
    calls, _ = decode(
        monkeypatch,
        due=due,
        draft_extend=DraftExtend.WHEN_DRAFTING if is_postponed else DraftExtend.EVERY_STEP,
    )
    assert calls == [
        *PLAN,
        *SEND,
        *(CATCH_UP if due.rows else []),
        *DRAFT_AND_VERIFY,
        *(POSTPONE if is_postponed else EXTEND),
    ]


@pytest.mark.parametrize("gives_lengths", [False, True])
def test_a_step_that_runs_ahead_neither_commits_nor_plans(
    monkeypatch: pytest.MonkeyPatch, gives_lengths: bool
) -> None:
    held: Any = None
    ahead = StepPlan(
        held,
        DraftPlans.plain(1),
        cached_lens=np.array([10]),
        width=1,
        num_plain=2,
        runs_ahead=True,
        gives_lengths=gives_lengths,
    )
    calls, batch = decode(monkeypatch, ahead=ahead)
    assert calls == [*SEND, *DRAFT_AND_VERIFY, *EXTEND]
    lengths = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu.tolist()
    assert (lengths, batch.seq_lens_sum) == (([10], 10) if gives_lengths else (None, None))
