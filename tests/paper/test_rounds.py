"""Throughputs, speedups, means and their spread, worked out by hand and against scipy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from scipy import stats

from sglang_hvd.paper.results import Measurement, Mode, Result
from sglang_hvd.paper.rounds import (
    Cell,
    Load,
    Measured,
    Missing,
    Rounds,
    Total,
    _student_95,
    noise_of,
)
from tests.paper.made_up import LABELS, SPEEDS, measurement, result


def of_speeds(speeds: Mapping[tuple[str, str], list[float]], **given: object) -> Rounds:
    """A run with these tokens per second by mode and data set, in rounds 0, 1, ..."""
    measured = tuple(
        measurement(mode, name, number, speed=speed)
        for (mode, name), rounds in speeds.items()
        for number, speed in enumerate(rounds)
    )
    names = tuple(dict.fromkeys(name for _, name in speeds))
    return Rounds(result(names, measurements=measured, **given))


def value(cell: Cell) -> float:
    assert isinstance(cell, Measured), cell
    return cell.value


def why(cell: Cell) -> str:
    assert isinstance(cell, Missing), cell
    return cell.why


def test_a_speedup_is_the_median_of_the_ratios_in_the_same_round() -> None:
    run = of_speeds({("greedy", "mbpp"): [100, 50, 200], ("hvd", "mbpp"): [150, 100, 240]})
    found = run.speedup("hvd", "greedy", "mbpp")
    assert found == Measured(pytest.approx(1.5), pytest.approx(1.2), pytest.approx(2.0), 3)


def test_a_machine_that_slows_down_slows_both_modes() -> None:
    run = of_speeds({("greedy", "mbpp"): [100, 10, 1], ("hvd", "mbpp"): [150, 15, 1.5]})
    found = run.speedup("hvd", "greedy", "mbpp")
    assert isinstance(found, Measured)
    assert (found.low, found.high) == (pytest.approx(1.5), pytest.approx(1.5))
    assert value(run.noise(["mbpp"])) == pytest.approx(0, abs=1e-9)


def test_a_slower_mode_has_a_speedup_below_one() -> None:
    run = of_speeds({("greedy", "mbpp"): [100], ("hvd", "mbpp"): [80]})
    assert value(run.speedup("hvd", "greedy", "mbpp")) == pytest.approx(0.8)
    assert value(run.mean_speedup("hvd", "greedy", ["mbpp"])) == pytest.approx(0.8)


def test_the_figures_of_a_total_are_those_of_appendix_a() -> None:
    """G = 4000 tokens in C = 2500 cycles and T = 20 s."""
    parts = [
        measurement("hvd-paper", "mbpp", num_tokens=1000, seconds=15.0, num_cycles=500).model_copy(
            update={"num_accepted": 450, "cycles": {"cache": 300, "model": 200}}
        ),
        measurement(
            "hvd-paper", "mt-bench", num_tokens=3000, seconds=5.0, num_cycles=2000
        ).model_copy(update={"num_accepted": 800, "cycles": {"both": 500, "none": 1500}}),
    ]
    total = Total.of(parts)
    assert total.throughput == 200
    assert total.cycles_per_1k == 625
    assert total.cycle_ms == 8
    assert total.mean_accepted == 0.5
    shares = [total.share(source) for source in ("cache", "model", "both", "none")]
    assert shares == [0.12, 0.08, 0.2, 0.6]


@pytest.mark.parametrize(
    ("cycles", "accepted"), [(240.2, 3.16), (397.8, 1.51), (188.4, 4.31), (264.0, 2.79)]
)
def test_accepted_tokens_per_cycle_are_counted_as_in_the_papers_tables(
    cycles: float, accepted: float
) -> None:
    """A cycle generates its bonus token and what it accepts."""
    num_cycles = round(100 * cycles)
    total = Total(100_000, 1.0, num_cycles, 100_000 - num_cycles, {"cache": num_cycles})
    assert total.mean_accepted == pytest.approx(accepted, abs=0.01)


def test_a_mode_without_drafts_has_no_accepted_length() -> None:
    total = Total.of([measurement("greedy", "mbpp")])
    assert (total.mean_accepted, total.share("cache")) == (None, None)
    assert total.cycles_per_1k == 1000


def test_a_mode_that_does_not_say_what_its_cycles_verify_has_no_shares() -> None:
    total = Total(1000, 1.0, 400, 600, {})
    assert [total.share(source) for source in ("cache", "model", "both")] == [None] * 3
    assert total.mean_accepted == 1.5


def test_replies_of_one_token_have_no_cycle() -> None:
    total = Total.of([measurement("hvd", "mbpp", num_cycles=0, num_accepted=0, cycles={})])
    assert (total.cycles_per_1k, total.cycle_ms) == (0, None)
    assert (total.mean_accepted, total.share("cache")) == (None, None)


def test_the_mean_speedup_is_geometric_over_the_data_sets() -> None:
    speeds = {"mbpp": [200.0, 400.0, 800.0], "mt-bench": [50.0, 100.0, 50.0]}
    run = of_speeds(
        {(mode, name): [100.0] * 3 for mode in ("greedy",) for name in speeds}
        | {("hvd", name): rounds for name, rounds in speeds.items()}
    )
    found = run.mean_speedup("hvd", "greedy", list(speeds))
    of_rounds = [stats.gmean(column) / 100 for column in zip(*speeds.values(), strict=True)]
    assert of_rounds == pytest.approx([1, 2, 2])
    assert isinstance(found, Measured)
    assert (found.value, found.low, found.high) == pytest.approx((2, 1, 2))
    arithmetic = run.mean_speedup("hvd", "greedy", list(speeds), is_geometric=False)
    assert value(arithmetic) == pytest.approx(np.median([1.25, 2.5, 4.25]))


def test_a_mean_says_what_it_lacks() -> None:
    run = of_speeds(
        {
            ("greedy", "mbpp"): [100.0, 100.0],
            ("greedy", "mt-bench"): [100.0],
            ("greedy", "bfcl"): [100.0],
            ("hvd", "mbpp"): [200.0, 800.0],
            ("hvd", "mt-bench"): [200.0],
        }
    )
    found = run.mean_speedup("hvd", "greedy", ["mbpp", "mt-bench", "bfcl"])
    # Of round 1 mt-bench has nothing, so it counts for neither.
    assert found == Measured(
        pytest.approx(2), pytest.approx(2), pytest.approx(2), 1, "2 of 3", "1 of 2 rounds"
    )


def test_a_figure_of_fewer_rounds_says_so() -> None:
    kept = result(["mbpp"])
    broken = tuple(
        one.model_copy(update={"error": "the server ended"})
        if (one.mode, one.round) in (("hvd", 1), ("hvd", 2))
        else one
        for one in kept.measurements
    )
    run = Rounds(kept.model_copy(update={"measurements": broken}))
    for found in (
        run.speedup("hvd", "greedy", "mbpp"),
        run.mean_speedup("hvd", "greedy", ["mbpp"]),
    ):
        assert isinstance(found, Measured)
        assert (found.num_rounds, found.rounds_note) == (1, "1 of 3 rounds")
    whole = run.speedup("eagle3", "greedy", "mbpp")
    assert isinstance(whole, Measured)
    assert (whole.num_rounds, whole.rounds_note) == (3, "")


def test_what_is_missing_says_why() -> None:
    modes = tuple(
        Mode(name=name, label=LABELS[name], flags=(), why_not="no" if name == "suffix" else None)
        for name in LABELS
    )
    broken = measurement("hvd", "mbpp").model_copy(update={"error": "the server ended"})
    kept = result(["mbpp"], ["greedy"])
    kept = kept.model_copy(update={"modes": modes, "measurements": (*kept.measurements, broken)})
    run, going_on = Rounds(kept), Rounds(kept.model_copy(update={"is_complete": False}))
    assert why(run.speedup("hvd", "greedy", "mbpp")) == "broke off"
    assert why(run.speedup("suffix", "greedy", "mbpp")) == "not served"
    assert why(run.speedup("eagle3", "greedy", "mbpp")) == "not run"
    assert why(going_on.speedup("eagle3", "greedy", "mbpp")) == "not yet run"
    assert why(run.speedup("ngram", "greedy", "mbpp")) == "not run"
    assert why(run.mean_speedup("hvd", "greedy", [])) == "not run"


def test_other_prompts_are_not_compared() -> None:
    measured = (
        measurement("greedy", "mbpp", num_requests=20),
        measurement("hvd", "mbpp", num_requests=19),
    )
    run = Rounds(result(["mbpp"], measurements=measured))
    assert why(run.speedup("hvd", "greedy", "mbpp")) == "other prompts"


@pytest.mark.parametrize("given", [{"num_tokens": 0}, {"seconds": 0.0}])
def test_a_measurement_without_tokens_or_time_has_no_throughput(given: dict[str, float]) -> None:
    measured = (
        measurement("greedy", "mbpp"),
        measurement("hvd", "mbpp").model_copy(update=given),
    )
    run = Rounds(result(["mbpp"], measurements=measured))
    assert why(run.speedup("hvd", "greedy", "mbpp")) == "broke off"


def test_loads_are_kept_apart() -> None:
    measured: tuple[Measurement, ...] = tuple(
        measurement(mode, "mbpp", concurrency=number, speed=speed)
        for mode, number, speed in (
            *(("greedy", 1, 100), ("hvd", 1, 200), ("greedy", 8, 400), ("hvd", 8, 600)),
        )
    )
    run = Rounds(result(["mbpp"], measurements=measured))
    assert value(run.speedup("hvd", "greedy", "mbpp")) == pytest.approx(2)
    assert value(run.speedup("hvd", "greedy", "mbpp", Load(concurrency=8))) == pytest.approx(1.5)
    assert run.loads() == [Load(), Load(concurrency=8)]


def test_a_run_that_omits_the_template_everywhere_has_its_tables_without_it() -> None:
    measured = tuple(measurement(m, "mbpp", template="none") for m in ("greedy", "hvd"))
    run = Rounds(result(["mbpp"], measurements=measured))
    assert value(run.speedup("hvd", "greedy", "mbpp")) == pytest.approx(2.4)


def test_totals_need_each_data_set_in_the_same_round() -> None:
    run = of_speeds({("hvd", "mbpp"): [100.0, 100.0], ("hvd", "mt-bench"): [50.0]})
    found = run.totals("hvd", ["mbpp", "mt-bench"])
    assert not isinstance(found, Missing)
    assert list(found) == [0]
    assert found[0].throughput == pytest.approx(2000 / 30)  # not the mean of 100 and 50
    assert isinstance(run.totals("hvd", ["mbpp", "bfcl"]), Missing)


def test_modes_share_the_data_sets_that_each_of_them_has() -> None:
    run = of_speeds({("greedy", "mbpp"): [1], ("greedy", "bfcl"): [1], ("hvd", "bfcl"): [1]})
    assert run.data_sets(["greedy", "hvd"]) == ["bfcl"]
    # A mode that was never run takes nothing away.
    assert run.data_sets(["greedy", "ngram"]) == ["mbpp", "bfcl"]


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 10, 30, 100])
def test_students_quantile_is_scipys(freedom: int) -> None:
    tolerance = 0.01 if freedom > 2 else 1e-9
    assert _student_95(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=tolerance)


@pytest.mark.parametrize("num_rounds", [2, 3, 5])
def test_a_mode_measured_twice_differs_by_more_than_the_noise_in_one_case_of_twenty(
    num_rounds: int,
) -> None:
    random = np.random.default_rng(num_rounds)
    num_runs, outside = 2000, 0
    for _ in range(num_runs):
        slow_rounds = random.normal(0, 0.3, num_rounds)
        logs = random.normal(0, 0.05, (6, num_rounds)) + slow_rounds
        speeds = np.exp(logs) * np.array([[100], [100], [150], [80], [160], [240]])
        found = noise_of([dict(enumerate(map(float, row))) for row in speeds])
        ratio = float(np.median(speeds[0] / speeds[1]))
        outside += abs(math.log(ratio)) > math.log1p(value(found))
    assert 0.01 < outside / num_runs < 0.07


def test_the_noise_of_a_mean_is_less_than_that_of_its_parts() -> None:
    random = np.random.default_rng(0)
    speeds = {
        (mode, name): (100 * np.exp(random.normal(0, 0.05, 3))).tolist()
        for mode in LABELS
        for name in ("mbpp", "bfcl", "spider", "alpaca")
    }
    run = of_speeds(speeds)
    names = sorted({name for _, name in speeds})
    parts = [math.log1p(value(run.noise([name]))) for name in names]
    assert math.log1p(value(run.noise(names))) == pytest.approx(np.linalg.norm(parts) / 4)


def test_one_round_or_one_mode_has_no_noise() -> None:
    assert why(of_speeds({("hvd", "mbpp"): [1], ("greedy", "mbpp"): [1]}).noise(["mbpp"])) == (
        "one round"
    )
    assert why(of_speeds({("hvd", "mbpp"): [1, 2, 3]}).noise(["mbpp"])) == "one way"
    assert why(of_speeds({("hvd", "mbpp"): [1]}).noise(["bfcl"])) == "not run"


def test_a_mode_that_lacks_a_round_does_not_count_for_the_noise() -> None:
    rounds: Result = result(["mbpp"])
    lost = measurement("hvd", "mbpp", 2, speed=SPEEDS["hvd"] * 1.1)
    fewer = tuple(one for one in rounds.measurements if one != lost)
    assert len(fewer) == len(rounds.measurements) - 1
    run = Rounds(rounds.model_copy(update={"measurements": fewer}))
    found = run.noise(["mbpp"])
    assert isinstance(found, Measured)
    assert found.num_rounds == 3
