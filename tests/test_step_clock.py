"""Steps, phases and shares, on a clock that the tests turn."""

import pytest

from sglang_hvd.step_clock import Phase, StepClock


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
