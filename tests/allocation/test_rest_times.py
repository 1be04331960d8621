"""What steps take beside their parts, learned from timed steps."""

import numpy as np
import pytest

from sglang_hvd.allocation.rest_times import RestFit, RestTimes, split_rest


@pytest.mark.parametrize("num_waits", [4, 8, 15])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_pauses_in_the_first_steps_and_after_them_change_little(
    num_waits: int, num_requests: int
) -> None:
    rest = RestFit()
    for milliseconds in [50.0] * num_waits + [0.5] * (32 - num_waits) + [60.0] * 5:
        rest.add(num_requests, milliseconds)
    assert rest.solve() @ [1, num_requests] < 2.0


def test_a_wait_is_not_held_for_free_by_steps_of_long_ago() -> None:
    # A busy host, of which some steps were launched ahead, then an idle one, of which none was.
    rest = RestTimes(runs_ahead=True)
    for number in range(200):
        is_ahead = number % 2 == 0
        rest.add(8, 6.0 if is_ahead else 9.0, is_before_ahead=is_ahead)
    assert wait_of(rest) == pytest.approx(3.0, rel=0.01)
    for _ in range(1000):
        rest.add(8, 3.0, is_before_ahead=False)
    assert wait_of(rest) > 2.0
    for _ in range(20):
        rest.add(8, 0.5, is_before_ahead=True)
        rest.add(8, 3.0, is_before_ahead=False)
    assert wait_of(rest) == pytest.approx(2.5, rel=0.3)


def test_a_wait_that_fewer_requests_showed_is_as_long_for_more() -> None:
    rest = RestTimes(runs_ahead=True)
    for _ in range(100):
        rest.add(8, 1.5, is_before_ahead=True)
        rest.add(8, 5.0, is_before_ahead=False)
    assert wait_of(rest, 64) == pytest.approx(3.5, rel=0.01)


def wait_of(rest: RestTimes, num_requests: int = 8) -> float:
    _, wait = split_rest(rest.solve(), np.array([num_requests]))
    return float(wait[0])


def test_what_more_requests_take_beside_the_parts_is_no_pause() -> None:
    rest = RestFit()
    for number in range(64):
        n = 64 if number % 3 == 2 else 1
        rest.add(n, 0.4 + 0.1 * n)
    assert rest.solve() @ [1, 64] == pytest.approx(6.8, rel=0.05)
