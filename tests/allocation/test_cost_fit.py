"""Costs learned from timed steps."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from sglang_hvd.allocation import CostFit, costs_of
from sglang_hvd.costs import StepCosts

WIDTHS = (1, 2, 8, 32)


def linear(num_requests: int, width: int) -> float:
    return 5 + 0.3 * num_requests + 0.02 * num_requests * width


def test_steps_of_several_sizes_give_the_terms_of_their_times() -> None:
    fit, random = CostFit(WIDTHS), np.random.default_rng(0)
    for _ in range(400):
        n, w = int(random.integers(1, 17)), int(random.choice(WIDTHS))
        noise = 1 + 0.05 * random.standard_normal()
        fit.observe_verify(n, w, linear(n, w) * noise)
        fit.observe_extend(n, w, (0.4 + 0.001 * n * w) * noise)
        fit.observe_draft(n, 8, 7 * (0.5 + 0.01 * n) * noise)
    costs = costs_of(fit.coefficients(), WIDTHS)
    assert costs is not None
    for n, w in ((1, 1), (4, 32), (16, 8)):
        assert costs.verify_ms(n, [w])[0] == pytest.approx(linear(n, w), rel=0.05)
    assert costs.draft_ms([8], 8)[0] == pytest.approx(7 * 0.58, rel=0.05)
    assert costs.draft_extend_ms(16, [32])[0] == pytest.approx(0.912, rel=0.05)


def test_each_step_has_the_rest_once() -> None:
    fit = CostFit(WIDTHS)
    for w in WIDTHS:
        fit.observe_verify(1, w, linear(1, w))
        fit.observe_rest(1, 2.0)
        fit.observe_rest(1, -0.1)  # clocks differ
    costs = costs_of(fit.coefficients(), WIDTHS)
    assert costs is not None
    alone = costs_of(np.append(fit.coefficients()[:-4], [0, 0, 0, 0]), WIDTHS)
    assert alone is not None
    rest = costs.verify_ms(1, [1, 32]) - alone.verify_ms(1, [1, 32])
    assert rest[0] == pytest.approx(rest[1])
    assert 0 < rest[0] <= 2


def test_what_was_never_seen_costs_more_the_wider_it_is() -> None:
    fit = CostFit(WIDTHS)
    for _ in range(20):
        fit.observe_verify(1, 32, 10.0)
    costs = costs_of(fit.coefficients(), WIDTHS)
    assert costs is not None
    assert costs.verify_ms(1, [32])[0] == pytest.approx(10, rel=0.01)
    assert costs.verify_ms(1, [1])[0] < 1


@pytest.mark.parametrize("batch_sizes", [(1, 64), (1, 4, 16, 64, 256)])
def test_many_requests_do_not_hide_what_a_step_of_one_takes(batch_sizes: Sequence[int]) -> None:
    fit, random = CostFit(WIDTHS), np.random.default_rng(0)
    for _ in range(2000):
        n, w = int(random.choice(batch_sizes)), int(random.choice(WIDTHS))
        taken = 8 + 0.02 * n + 0.0005 * n * w
        fit.observe_verify(n, w, taken * (1 + 0.03 * random.standard_normal()))
    costs = fit.table(fit.coefficients())
    assert costs is not None
    assert costs.verify_ms(1, [1])[0] == pytest.approx(8, rel=0.02)


@pytest.mark.parametrize("seen", [1, 8, 64])
def test_what_a_step_takes_whatever_its_width_it_takes_whatever_its_requests(seen: int) -> None:
    fit = CostFit(WIDTHS)
    for _ in range(100):
        for w in WIDTHS:
            fit.observe_verify(seen, w, 6 + 0.001 * seen * w)
            fit.observe_rest(seen, 4.0)
    verify = fit.coefficients()[:3]
    assert verify @ [1, seen, seen] == pytest.approx(6 + 0.001 * seen, rel=0.01)
    assert verify @ [1, 1, 1] == pytest.approx(6, rel=0.02)
    assert fit.coefficients()[-4:] @ [1, 1, 0, 0] == pytest.approx(4, rel=0.01)
    assert fit.coefficients()[-4:] @ [1, 64, 0, 0] == pytest.approx(4, rel=0.01)


def of_drafts(milliseconds: Mapping[int, float], num_requests: int = 1) -> StepCosts:
    """What drafts of so many requests show, seen twenty times each. milliseconds: by steps."""
    fit = CostFit(WIDTHS)
    for _ in range(20):
        for num_steps, taken in milliseconds.items():
            fit.observe_verify(num_requests, 8, 5.0)
            fit.observe_draft(num_requests, num_steps, taken)
    costs = costs_of(fit.coefficients(), WIDTHS)
    assert costs is not None
    return costs


@pytest.mark.parametrize("seen", [1, 8, 64])
def test_a_round_is_expected_to_take_as_long_for_fewer_requests_and_for_more(seen: int) -> None:
    costs = of_drafts({8: 3.5}, seen)
    assert costs.draft_ms([1, 16, 64], 8) == pytest.approx([3.5] * 3, rel=0.01)


def test_what_a_draft_takes_beside_its_rounds_is_told_by_drafts_of_several_lengths() -> None:
    costs = of_drafts({steps: 0.3 + 0.5 * (steps - 1) for steps in (1, 2, 4, 8)})
    for num_steps in (1, 4, 8):
        taken = 0.3 + 0.5 * (num_steps - 1)
        assert costs.draft_ms([1, 0], num_steps) == pytest.approx([taken, 0], rel=0.05)


def test_the_time_of_drafts_of_one_length_is_put_to_their_rounds() -> None:
    costs = of_drafts({8: 3.5})
    assert costs.draft_ms([1], 8)[0] == pytest.approx(3.5, rel=0.02)
    assert costs.draft_ms([1], 2)[0] < 0.8


def test_times_that_fall_with_the_width_do_not_make_a_table_that_does() -> None:
    fit = CostFit(WIDTHS)
    for _ in range(20):
        fit.observe_verify(1, 1, 10.0)
        fit.observe_verify(1, 32, 8.0)
    costs = costs_of(fit.coefficients(), WIDTHS)
    assert costs is not None
    narrow, wide = costs.verify_ms(1, [1, 32])
    assert wide >= narrow > 8


def test_a_single_pause_changes_little() -> None:
    fit = CostFit(WIDTHS)
    for _ in range(100):
        fit.observe_verify(1, 8, 5.0)
    fit.observe_verify(1, 8, 5000.0)
    costs = costs_of(fit.coefficients(), WIDTHS)
    assert costs is not None
    assert costs.verify_ms(1, [8])[0] == pytest.approx(5.1, abs=0.1)


def test_costs_that_change_are_followed() -> None:
    fit = CostFit(WIDTHS)
    for milliseconds in (5.0, 10.0):
        for _ in range(2000):
            fit.observe_verify(1, 8, milliseconds)
    costs = costs_of(fit.coefficients(), WIDTHS)
    assert costs is not None
    assert costs.verify_ms(1, [8])[0] == pytest.approx(10, rel=0.05)


def test_before_any_step_there_is_no_table() -> None:
    fit = CostFit(WIDTHS)
    assert fit.num_observed == 0
    assert costs_of(fit.coefficients(), WIDTHS) is None


def test_another_process_makes_the_same_table_of_the_terms() -> None:
    fit = CostFit(WIDTHS)
    for w in WIDTHS:
        fit.observe_verify(3, w, linear(3, w))
    sent = np.frombuffer(fit.coefficients().tobytes())
    assert costs_of(sent, WIDTHS) == costs_of(fit.coefficients(), WIDTHS)


@pytest.mark.parametrize("spread", [0.0, 3.0, 6.0])
def test_times_that_differ_are_learned_as_their_mean(spread: float) -> None:
    fit = CostFit(WIDTHS)
    for step in range(2000):
        fit.observe_verify(1, 8, 10.0 + spread * (-1) ** step)
    costs = costs_of(fit.coefficients(), WIDTHS)
    assert costs is not None
    assert costs.verify_ms(1, [8])[0] == pytest.approx(10.0, rel=0.03)


@pytest.mark.parametrize("milliseconds", [0.0, 0.01, 0.3, 100.0])
def test_a_draft_without_rounds_leaves_what_rounds_cost(milliseconds: float) -> None:
    # All time was put to the rounds: without one nothing was expected.
    fit = CostFit(WIDTHS)
    fit.observe_verify(1, 32, 10.0)
    for _ in range(200):
        fit.observe_draft(1, 4, 1.5)
        fit.observe_draft(1, 8, 3.5)
    for _ in range(10):
        fit.observe_draft(1, 1, milliseconds)
        for _ in range(50):
            fit.observe_draft(1, 8, 3.5)
        costs = costs_of(fit.coefficients(), WIDTHS)
        assert costs is not None
        assert costs.draft_ms([1], 8)[0] == pytest.approx(3.5, rel=0.25)


def test_what_drafts_took_long_ago_counts_for_little_beside_a_few_new_times() -> None:
    fit = CostFit([1, 16])
    for _ in range(200):
        fit.observe_verify(1, 1, 5.0)
        fit.observe_draft(1, 8, 28.0)
    for _ in range(16):
        for _ in range(256):
            fit.observe_verify(1, 1, 5.0)
        fit.observe_draft(1, 8, 3.5)
    costs = fit.table(fit.coefficients())
    assert costs is not None
    assert costs.draft_ms([1], 8)[0] == pytest.approx(3.5, rel=0.3)
