"""Steps, phases and shares, on a clock that the tests turn."""

import pytest

from sglang_hvd.step_clock import Phase, Stage, StepClock


class Time:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def spend(clock: StepClock, time: Time, phase: Phase, seconds: float) -> None:
    with clock.measure(phase):
        time.seconds += seconds


def test_a_step_lasts_until_the_next_one_begins() -> None:
    time = Time()
    clock = StepClock(time)
    for propose in (0.001, 0.003):
        clock.begin_step()
        spend(clock, time, Phase.PROPOSE, propose)
        time.seconds += 0.010 - propose
    clock.end_step()
    totals = clock.totals()
    assert totals.num_steps == 2
    assert totals.step == pytest.approx(0.020)
    assert totals.phases[Phase.PROPOSE] == totals.host == pytest.approx(0.004)


def test_nothing_counts_between_steps() -> None:
    time = Time()
    clock = StepClock(time)
    clock.begin_step()
    time.seconds += 0.010
    clock.end_step()
    spend(clock, time, Phase.COMMIT, 0.005)
    time.seconds += 1.0
    clock.end_step()
    clock.begin_step()
    time.seconds += 0.010
    clock.end_step()
    totals = clock.totals()
    assert (totals.num_steps, totals.host) == (2, 0)
    assert totals.step == pytest.approx(0.020)


def test_a_phase_may_come_several_times_in_a_step() -> None:
    time = Time()
    clock = StepClock(time)
    clock.begin_step()
    spend(clock, time, Phase.BUILD, 0.001)
    spend(clock, time, Phase.TRANSFER, 0.002)
    spend(clock, time, Phase.BUILD, 0.001)
    clock.end_step()
    assert clock.totals().phases[Phase.BUILD] == pytest.approx(0.002)


def test_a_phase_that_raises_is_counted_all_the_same() -> None:
    time = Time()
    clock = StepClock(time)
    clock.begin_step()
    timer = clock.measure(Phase.PROPOSE)
    timer.__enter__()
    time.seconds += 0.001
    timer.__exit__(KeyError, KeyError(), None)
    clock.end_step()
    assert clock.totals().host == pytest.approx(0.001)


def test_the_description_has_means_quantiles_and_shares() -> None:
    time = Time()
    clock = StepClock(time)
    assert clock.describe() == {"num_steps": 0}
    for step in range(100):
        clock.begin_step()
        spend(clock, time, Phase.PREDICT, 0.004 if step == 99 else 0.001)
        time.seconds += 0.010
    clock.end_step()
    told = clock.describe()
    assert told["num_steps"] == 100
    assert told["host_us"] == pytest.approx(1030)
    assert told["host_us_p50"] == pytest.approx(1000)
    assert told["host_us_p99"] == pytest.approx(1030, rel=0.1)
    assert told["host_us_by_phase"]["predict"] == pytest.approx(1030)
    assert told["host_us_by_phase"]["build"] == 0
    assert told["host_share"] == pytest.approx(0.103 / 1.103)
    assert told["host_share_p50"] == pytest.approx(1 / 11)


def reach(clock: StepClock, time: Time, **ms: float) -> None:
    """Lets each stage take so long."""
    for name, spent in ms.items():
        time.seconds += spent / 1e3
        clock.reach(Stage(name))


def test_the_gap_goes_from_the_tokens_to_the_launch_without_the_draft() -> None:
    time = Time()
    clock = StepClock(time)
    clock.begin_step()
    clock.know_tokens()
    time.seconds += 0.001
    clock.begin_step()  # what SGLang does between the steps counts
    reach(clock, time, plan=2, draft=50, layout=0.5, launch=0.25)
    time.seconds += 1.0
    clock.end_step()
    gap = clock.describe()["gap"]
    assert isinstance(gap, dict)
    assert (gap["num_gaps"], gap["us"], gap["us_p50"]) == (1, *[pytest.approx(3750)] * 2)
    in_us = {"schedule": 1000, "plan": 2000, "draft": 50000, "layout": 500, "launch": 250}
    assert gap["us_by_stage"] == pytest.approx(in_us)
    assert clock.new_gaps() == pytest.approx([0.00375])
    assert clock.new_gaps() == []


def test_a_step_that_does_not_wait_for_tokens_has_no_gap() -> None:
    time = Time()
    clock = StepClock(time)
    clock.begin_step()
    reach(clock, time, plan=2, draft=50, layout=0.5, launch=0.25)
    clock.end_step()
    assert clock.describe()["gap"] == {"num_gaps": 0}
    clock.know_tokens()
    clock.end_step()  # a pause, or a prefill
    clock.begin_step()
    reach(clock, time, plan=2, draft=50, layout=0.5, launch=0.25)
    clock.end_step()
    assert clock.describe()["gap"] == {"num_gaps": 0}
