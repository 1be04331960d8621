"""What the scheduler does reaches the worker."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import overlap_utils
from sglang.srt.managers import scheduler as sglang_scheduler

from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.engine.served_costs import ServedCosts
from sglang_hvd.plugin.engine.worker import HvdWorker
from sglang_hvd.plugin.hooks.scheduler_events import (
    launch_step,
    note_aborted,
    note_finished,
    note_pause,
)
from sglang_hvd.plugin.requests.bad_requests import running_requests
from sglang_hvd.plugin.requests.marks import mark_held
from sglang_hvd.step_clock import StepClock
from tests.plugin.engine.test_served_costs import Stopwatch, allocator, served


def scheduler(**attributes: Any) -> Any:
    """A scheduler with a worker that has no models."""
    worker = HvdWorker.__new__(HvdWorker)
    worker._costs = served(allocator(), Stopwatch())
    for name, value in attributes.items():
        setattr(worker, name, value)
    return SimpleNamespace(
        draft_worker=worker,
        server_args=SimpleNamespace(_hvd_launch="a launch"),
        future_map=SimpleNamespace(needs_cpu_seq_lens=True),
        enable_overlap=True,
    )


BATCH: Any = SimpleNamespace(
    reqs=["a request"], forward_mode=SimpleNamespace(is_decode=lambda: True)
)


class _Rule:
    """Stands for the rule of which steps run ahead."""

    def __init__(self, *, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead
        self.gave_lengths: list[bool] = []

    def step_plan(self, batch: Any, *, gives_lengths: bool) -> Any:
        self.gave_lengths.append(gives_lengths)
        return "a plan" if self.runs_ahead else None


def asks_for_lengths(of: Any) -> bool:
    """Whether SGLang asks the device for lengths in the next step."""
    found: list[bool] = []

    def run_batch(scheduler: Any, batch: Any, option: str) -> str:
        assert (scheduler, batch, option) == (of, BATCH, "an option")
        assert running_requests() == ["a request"]
        found.append(scheduler.future_map.needs_cpu_seq_lens)
        return "a result"

    assert launch_step(run_batch, of, BATCH, "an option") == "a result"
    assert running_requests() is None
    [asks] = found
    return asks


@pytest.mark.parametrize("are_needed", [True, False])
def test_a_step_that_runs_ahead_does_not_ask_the_device_for_lengths(are_needed: bool) -> None:
    rule = _Rule(runs_ahead=True)
    of = scheduler(_run_ahead=rule, _ahead=None)
    of.future_map.needs_cpu_seq_lens = are_needed
    assert not asks_for_lengths(of)
    assert rule.gave_lengths == [are_needed]
    assert of.draft_worker._ahead == "a plan"  # for the step that is launched
    assert of.future_map.needs_cpu_seq_lens is are_needed  # for the next step


@pytest.mark.parametrize("rule", [None, _Rule(runs_ahead=False)])
def test_other_steps_do(rule: _Rule | None) -> None:
    assert asks_for_lengths(scheduler(_run_ahead=rule, _ahead=None))


def test_the_costs_of_a_step_are_worked_out_before_sglang_waits_for_tokens() -> None:
    made = allocator()
    of = scheduler(_run_ahead=None, _ahead=None, _costs=served(made, Stopwatch()))

    def run_batch(*args: object) -> bool:
        return len(BATCH.reqs) in made._of_batch

    assert launch_step(run_batch, of, BATCH)


def test_without_overlap_scheduling_no_step_runs_ahead() -> None:
    of = scheduler(_run_ahead=_Rule(runs_ahead=True), _ahead=None)
    of.enable_overlap = False
    assert asks_for_lengths(of)


def test_a_step_that_fails_leaves_the_next_its_lengths() -> None:
    def run_batch(*args: object) -> None:
        raise RuntimeError("no memory")

    of = scheduler(_run_ahead=_Rule(runs_ahead=True), _ahead=None)
    with pytest.raises(RuntimeError):
        launch_step(run_batch, of, BATCH)
    assert running_requests() is None
    assert of.future_map.needs_cpu_seq_lens


def test_servers_without_hvd_launch_their_steps() -> None:
    plain: Any = SimpleNamespace(draft_worker=None, server_args=SimpleNamespace())
    assert launch_step(lambda scheduler, batch: "a result", plain, plain) == "a result"


def test_sglang_asks_for_lengths_so() -> None:
    """The lines of SGLang on which it rests."""
    resolve = inspect.getsource(overlap_utils.FutureMap.resolve_seq_lens_cpu)
    before, after = resolve.split("if not self.needs_cpu_seq_lens:")
    assert "batch.seq_lens = self.new_seq_lens_buf[fi]" in before
    assert "synchronize()" not in before.split("if _is_hip:")[0]
    assert "fwd_prepare_d2h_stream.synchronize()" in after
    run_batch = inspect.getsource(sglang_scheduler.Scheduler.run_batch)
    resolved = run_batch.index("self.future_map.resolve_seq_lens_cpu(batch)")
    # Lengths that the worker gives are for its own forward.
    isolated = run_batch.index("self._forward_isolation(batch, overlap=True)")
    assert resolved < isolated < run_batch.index("self.model_worker.forward_batch_generation(")


def test_a_pause_is_no_step() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])
    costs = ServedCosts(
        None, is_fixed=False, runs_ahead=False, device="cpu", ranks=RankGroup(), clock=clock
    )
    of_worker = {"_clock": clock, "_costs": costs, "_publish": lambda *, at_once: None}
    clock.begin_step()
    now[0] = 0.01
    note_pause(None, scheduler(**of_worker), None)
    now[0] = 3600.0
    clock.begin_step()
    now[0] = 3600.02
    clock.end_step()
    assert clock.totals().num_steps == 2
    assert clock.totals().step == pytest.approx(0.03)


def test_a_request_that_was_aborted_while_it_waited_is_dropped() -> None:
    dropped: list[Any] = []
    req: Any = object()
    note_aborted(None, scheduler(_held=SimpleNamespace(drop=dropped.append)), req)
    assert dropped == [req]


def test_a_request_that_ended_is_finished_where_the_worker_knows_it() -> None:
    ended: list[Any] = []
    launched = SimpleNamespace(note_finished_at_prefill=ended.append)
    known: Any = SimpleNamespace()
    other: Any = SimpleNamespace()
    mark_held(known, "as something")
    for req in (known, other):
        note_finished(None, scheduler(_launched=launched), req)
    assert ended == [known]


def test_without_hvd_nothing_happens_or_is_imported() -> None:
    script = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from sglang_hvd.plugin.hooks import hook_table, scheduler_events\n"
        "plain = SimpleNamespace(draft_worker=None, server_args=SimpleNamespace())\n"
        "scheduler_events.launch_step(lambda *args: None, plain, None)\n"
        "scheduler_events.note_idle(None, plain)\n"
        "scheduler_events.note_pause(None, plain, None)\n"
        "scheduler_events.note_aborted(None, plain, object())\n"
        "scheduler_events.note_finished(None, plain, SimpleNamespace())\n"
        "scheduler_events.add_hvd_state(None, SimpleNamespace(scheduler=plain), None)\n"
        "assert 'sglang.srt.speculative.eagle_info' not in sys.modules\n"
        "assert 'sglang_hvd.plugin.engine.worker' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
