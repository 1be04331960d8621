"""What the scheduler does without a step reaches the worker."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.engine.served_costs import ServedCosts
from sglang_hvd.plugin.engine.worker import HvdWorker
from sglang_hvd.plugin.hooks.scheduler_events import (
    end_step_at_pause,
    let_go_of_aborted,
    note_finished,
)
from sglang_hvd.plugin.requests.marks import mark_held
from sglang_hvd.step_clock import StepClock


def scheduler(**attributes: Any) -> Any:
    """A scheduler with a worker that has no models."""
    worker = HvdWorker.__new__(HvdWorker)
    for name, value in attributes.items():
        setattr(worker, name, value)
    return SimpleNamespace(draft_worker=worker, server_args=SimpleNamespace(_hvd_launch="a launch"))


def test_a_pause_is_no_step() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])
    costs = ServedCosts(
        None, is_fixed=False, widths=[1], device="cpu", ranks=RankGroup(), clock=clock
    )
    of_worker = {"_clock": clock, "_costs": costs, "_publish": lambda *, at_once: None}
    clock.begin_step()
    now[0] = 0.01
    end_step_at_pause(None, scheduler(**of_worker), None)
    now[0] = 3600.0
    clock.begin_step()
    now[0] = 3600.02
    clock.end_step()
    assert clock.totals().num_steps == 2
    assert clock.totals().step == pytest.approx(0.03)


def test_a_request_that_was_aborted_while_it_waited_is_let_go() -> None:
    let_go: list[Any] = []
    req = object()
    let_go_of_aborted(None, scheduler(_held=SimpleNamespace(let_go=let_go.append)), req)  # type: ignore[arg-type]
    assert let_go == [req]


def test_a_request_that_ended_is_finished_where_the_worker_knows_it() -> None:
    ended: list[Any] = []
    held = SimpleNamespace(note_finished_at_prefill=ended.append)
    known, other = SimpleNamespace(), SimpleNamespace()
    mark_held(known, "as something")  # type: ignore[arg-type]
    for req in (known, other):
        note_finished(None, scheduler(_held=held), req)  # type: ignore[arg-type]
    assert ended == [known]


def test_without_hvd_nothing_happens_or_is_imported() -> None:
    script = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from sglang_hvd.plugin.hooks import scheduler_events\n"
        "plain = SimpleNamespace(draft_worker=None, server_args=SimpleNamespace())\n"
        "scheduler_events.let_go_when_idle(None, plain)\n"
        "scheduler_events.end_step_at_pause(None, plain, None)\n"
        "scheduler_events.let_go_of_aborted(None, plain, object())\n"
        "scheduler_events.note_finished(None, plain, SimpleNamespace())\n"
        "scheduler_events.add_hvd_state(None, SimpleNamespace(scheduler=plain), None)\n"
        "assert 'sglang_hvd.plugin.engine.worker' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
