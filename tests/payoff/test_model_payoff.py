"""What the model drafter is expected to bring, and how it is learned."""

from collections.abc import Sequence

import numpy as np
import pytest

from sglang_hvd.payoff import ModelPayoff
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.types import DraftBatch

NUM_STEPS = 4
PRIOR = sum((2 / 3) ** step for step in range(1, NUM_STEPS + 1))


def drafts(first_ids: Sequence[int | None]) -> DraftBatch:
    """Cache drafts that begin with these tokens; None: nothing is proposed."""
    batch = DraftBatch.of_size(len(first_ids), 2)
    for row, first_id in enumerate(first_ids):
        batch.num_nodes[row] = 0 if first_id is None else 2
        batch.token_ids[row, 0] = first_id or 0
    return batch


def expect(made: ModelPayoff, slots: Sequence[int], probs: Sequence[float | None]) -> list[float]:
    """Each cache draft begins with token 5 and is right with that probability; None: no draft."""
    batch = drafts([None if prob is None else 5 for prob in probs])
    given = np.zeros((len(probs), MAX_DRAFT_LEN), np.float32)
    given[:, 0] = [prob or 0 for prob in probs]
    return made.expect(np.array(slots, np.int32), batch, given).tolist()


def observe(made: ModelPayoff, slot: int, *, is_right: bool, accepted: int | None) -> None:
    made.observe(np.array([slot], np.int32), [[5 if is_right else 6, 7]], [accepted])


def learned(cycles: int = 2000) -> ModelPayoff:
    """3 tokens where the cache is right, 1 where it is wrong, 2 without a draft."""
    made = ModelPayoff(NUM_STEPS)
    for number in range(cycles):
        made.start(0)  # each request has one cycle: no ratio
        kind = number % 3
        expect(made, [0], [None if kind == 2 else 0.5])
        observe(made, 0, is_right=kind == 1, accepted=(1, 3, 2)[kind])
    made.start(0)
    return made


def test_before_anything_was_seen_it_is_the_prior() -> None:
    made = ModelPayoff(NUM_STEPS)
    made.start(3)
    assert expect(made, [3], [0.1]) == expect(made, [3], [None]) == [pytest.approx(PRIOR)]
    figures = made.figures()
    assert (figures.num_verified, figures.mean_predicted, figures.mean_accepted) == (0, None, None)


def test_the_expectation_follows_the_confidence_of_the_cache() -> None:
    made = learned()
    for prob in (0.0, 0.25, 0.9, 1.0):
        assert expect(made, [0], [prob]) == [pytest.approx(1 + 2 * prob, abs=0.06)]
    assert expect(made, [0], [None]) == [pytest.approx(2, abs=0.06)]
    figures = made.figures()
    assert figures.num_verified == 2000
    assert figures.accepted_if_right == pytest.approx(3, abs=0.06)
    assert figures.accepted_if_wrong == pytest.approx(1, abs=0.06)
    assert figures.accepted_without_draft == pytest.approx(2, abs=0.06)
    assert figures.mean_accepted == pytest.approx(2, abs=0.01)
    assert figures.mean_predicted == pytest.approx(2, abs=0.1)


def test_without_probabilities_it_takes_how_often_the_cache_is_right() -> None:
    made = learned()
    batch = drafts([5])
    [expected] = made.expect(np.array([0], np.int32), batch, None).tolist()
    assert expected == pytest.approx(2, abs=0.06)  # right and wrong equally often


def test_a_request_has_its_own_ratio_and_the_next_in_its_slot_none() -> None:
    made = learned()
    made.start(1)
    for _ in range(200):
        made.observe(np.array([1], np.int32), [[5]], [None])  # tells nothing
        expect(made, [1], [1.0])
        observe(made, 1, is_right=True, accepted=1)
    [of_request] = expect(made, [1], [1.0])
    [of_others] = expect(made, [0], [1.0])
    assert of_request < 0.75 * of_others
    made.start(1)
    assert expect(made, [1], [1.0]) == expect(made, [0], [1.0])


def test_no_more_is_expected_than_there_are_steps() -> None:
    made = learned()
    for _ in range(500):
        expect(made, [0], [0.0])
        observe(made, 0, is_right=False, accepted=NUM_STEPS)
    assert expect(made, [0], [1.0]) == [NUM_STEPS]


def test_a_cycle_that_tells_nothing_changes_nothing() -> None:
    made = learned()
    before = made.figures(), expect(made, [0], [0.3])
    observe(made, 0, is_right=True, accepted=None)
    assert (made.figures(), expect(made, [0], [0.3])) == before


def test_a_row_does_not_depend_on_the_others() -> None:
    made = learned()
    for slot in range(9):
        made.start(slot)
    probs = [0.1 * slot for slot in range(8)] + [None]
    together = expect(made, range(9), probs)
    assert together == [value for slot in range(9) for value in expect(made, [slot], [probs[slot]])]
