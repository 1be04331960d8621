"""How fast requests and steps go."""

import numpy as np
import pytest

from sglang_hvd._native import Pace
from tests.allocation import pace_oracle


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def token_values(pace: Pace, *numbers: int) -> list[float]:
    values = np.empty(len(numbers))
    pace.write_token_values(slots(*numbers), values)
    return values.tolist()


def test_a_token_is_worth_more_to_a_request_that_goes_slowly() -> None:
    pace = Pace()
    for slot in (0, 1):
        pace.start(slot)
    for _ in range(100):
        pace.see_tokens(slots(0, 1), slots(1, 8))
    assert token_values(pace, 0, 1) == pytest.approx([1, 1 / 8], rel=0.01)


def test_a_new_request_in_a_slot_begins_at_the_mean_of_all() -> None:
    pace = Pace()
    pace.start(0)
    for _ in range(500):
        pace.see_tokens(slots(0), slots(4))
    pace.start(0)
    pace.start(7)
    assert token_values(pace, 0, 7) == pytest.approx([1 / 4, 1 / 4], rel=0.01)


def test_a_millisecond_costs_each_request_its_share_of_a_step() -> None:
    pace = Pace()
    assert pace.price(3, plain_ms=6.0) == 0.5
    for _ in range(100):
        pace.see_step(10.0, plain_ms=5.0)
    assert pace.price(3, plain_ms=5.0) == pytest.approx(0.3, rel=1e-3)


def test_another_batch_or_table_changes_the_price_at_once() -> None:
    pace = Pace()
    for _ in range(100):
        pace.see_step(10.0, plain_ms=5.0)
    assert pace.price(64, plain_ms=20.0) == pytest.approx(64 / 40, rel=1e-3)


def test_the_mean_of_all_does_not_depend_on_how_cycles_come_in_batches() -> None:
    together, apart = Pace(), Pace()
    for pace in (together, apart):
        pace.start(0)
        pace.start(1)
    for _ in range(300):
        together.see_tokens(slots(0, 1), slots(2, 4))
        apart.see_tokens(slots(0), slots(2))
        apart.see_tokens(slots(1), slots(4))
    for pace in (together, apart):
        pace.start(2)
    values = [token_values(pace, 2)[0] for pace in (together, apart)]
    assert values[0] == pytest.approx(values[1], rel=0.02)


def test_it_goes_as_its_definition_does() -> None:
    pace, oracle, random = Pace(), pace_oracle.Pace(), np.random.default_rng(0)
    started = slots(*range(40))
    for slot in started.tolist():
        pace.start(slot)
        oracle.start(slot)
    for step in range(500):
        if step % 10 == 0:  # a new request in a slot that was used, or not
            slot = int(random.integers(0, 100))
            pace.start(slot)
            oracle.start(slot)
        batch = random.permutation(started)[: random.integers(0, 41)]
        num_tokens = random.integers(0, 30, len(batch)).astype(np.int32)
        ms, plain_ms = random.uniform(5, 20, 2).tolist()
        for of_either in (pace, oracle):
            of_either.see_tokens(batch, num_tokens)
            of_either.see_step(ms, plain_ms)
        assert token_values(pace, *batch) == oracle.token_values(batch).tolist()
        assert pace.price(len(batch), plain_ms) == oracle.price(len(batch), plain_ms)


def test_slots_that_were_not_started_are_refused() -> None:
    pace = Pace()
    pace.start(1)
    for slot in (0, 2, 99, -1):
        with pytest.raises(ValueError, match="not started"):
            token_values(pace, slot)
        with pytest.raises(ValueError, match="not started"):
            pace.see_tokens(slots(slot), slots(1))
    with pytest.raises(ValueError, match="negative"):
        pace.start(-1)
