"""Which steps SGLang launches before the tokens of the last are read, and without their lengths."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups import overrides
from sglang.srt.managers import overlap_utils, scheduler
from sglang.srt.server_args import ServerArgs

from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin.engine.worker import HvdWorker
from sglang_hvd.plugin.hooks.run_ahead import launch_step
from sglang_hvd.plugin.startup.verify_widths import may_run_ahead


@pytest.mark.parametrize(
    ("has_overlap", "settings", "expected"),
    [
        (True, {}, False),
        (True, {"run_ahead": True}, True),
        (False, {"run_ahead": True}, False),
    ],
)
def test_steps_run_ahead_where_asked_to_under_overlap_scheduling(
    has_overlap: bool, settings: dict[str, Any], expected: bool
) -> None:
    cfg = SimpleNamespace(disable_overlap_schedule=not has_overlap)
    assert may_run_ahead(HvdConfig(**settings), cfg) is expected


def test_sglang_turns_overlap_scheduling_off_beside_its_arguments() -> None:
    """They hold what was asked for."""
    args = ServerArgs(model_path="none", device="cuda")
    overrides.declare_resolution(args, "a test", disable_overlap_schedule=True)
    config = HvdConfig(policy="allocate", run_ahead=True)
    assert may_run_ahead(config, args)
    assert not may_run_ahead(config, overrides.resolved_view(args))


class _Batch:
    """A batch of SGLang's, as far as it is looked at."""

    def __init__(self, *, is_decode: bool = True, has_grammar: bool = False) -> None:
        self.forward_mode = SimpleNamespace(is_decode=lambda: is_decode)
        self.has_grammar = has_grammar
        self.reqs = ["a request"]


def _scheduler(
    *,
    wants: bool = True,
    can: bool = True,
    are_needed: bool = True,
    has_overlap: bool = True,
    catches_up: bool = False,
) -> Any:
    worker = HvdWorker.__new__(HvdWorker)
    worker._runs_ahead = can
    worker._draft_worker = SimpleNamespace(ends_run=lambda num_requests: catches_up)
    worker._held = SimpleNamespace(runs_ahead=lambda reqs: wants)  # type: ignore[assignment]
    return SimpleNamespace(
        draft_worker=worker,
        server_args=SimpleNamespace(_hvd_launch="a launch"),
        future_map=SimpleNamespace(needs_cpu_seq_lens=are_needed),
        enable_overlap=has_overlap,
    )


def _run(of: Any, batch: _Batch) -> bool:
    """Whether SGLang asks the device for lengths in this step."""
    found: list[bool] = []

    def run_batch(scheduler: Any, batch: Any, option: str) -> str:
        assert (scheduler, batch, option) == (of, given, "an option")
        found.append(scheduler.future_map.needs_cpu_seq_lens)
        return "a result"

    given: Any = batch
    assert launch_step(run_batch, of, given, "an option") == "a result"
    [asks] = found
    return asks


@pytest.mark.parametrize("are_needed", [True, False])
def test_a_step_that_runs_ahead_does_not_ask_the_device_for_lengths(are_needed: bool) -> None:
    of = _scheduler(are_needed=are_needed)
    assert not _run(of, _Batch())
    assert of.draft_worker.gives_lengths is are_needed
    assert of.future_map.needs_cpu_seq_lens is are_needed  # for the next step


@pytest.mark.parametrize(
    ("of", "batch"),
    [
        (_scheduler(wants=False), _Batch()),
        (_scheduler(can=False), _Batch()),
        (_scheduler(catches_up=True), _Batch()),
        (_scheduler(has_overlap=False), _Batch()),
        (_scheduler(), _Batch(is_decode=False)),
        (_scheduler(), _Batch(has_grammar=True)),
    ],
)
def test_other_steps_do(of: Any, batch: _Batch) -> None:
    assert _run(of, batch)


def test_a_step_that_fails_leaves_the_next_its_lengths() -> None:
    def run_batch(*args: object) -> None:
        raise RuntimeError("no memory")

    of = _scheduler()
    given: Any = _Batch()
    with pytest.raises(RuntimeError):
        launch_step(run_batch, of, given)
    assert of.future_map.needs_cpu_seq_lens


def test_servers_without_hvd_launch_their_steps() -> None:
    plain: Any = SimpleNamespace(draft_worker=None, server_args=SimpleNamespace())
    assert launch_step(lambda scheduler, batch: "a result", plain, plain) == "a result"


def test_sglang_asks_for_lengths_so() -> None:
    """The lines of SGLang on which it rests."""
    resolve = inspect.getsource(overlap_utils.FutureMap.resolve_seq_lens_cpu)
    before, behind = resolve.split("if not self.needs_cpu_seq_lens:")
    assert "batch.seq_lens = self.new_seq_lens_buf[fi]" in before
    assert "synchronize()" not in before.split("if _is_hip:")[0]
    assert "fwd_prepare_d2h_stream.synchronize()" in behind
    run_batch = inspect.getsource(scheduler.Scheduler.run_batch)
    resolved = run_batch.index("self.future_map.resolve_seq_lens_cpu(batch)")
    # Lengths that the worker gives are for its own forward.
    isolated = run_batch.index("self._forward_isolation(batch, overlap=True)")
    assert resolved < isolated < run_batch.index("self.model_worker.forward_batch_generation(")
