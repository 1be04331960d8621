"""The prediction for the model drafter's draft, and how it is learned."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from sglang_hvd.payoff import SIZE_EFFECT, ModelFigures, ModelPredictor, VerifiedModelDrafts
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.suffix_cache.token_ids import padded
from sglang_hvd.types import DraftBatch

NUM_STEPS = 4
PRIOR = sum(0.9**step for step in range(1, NUM_STEPS + 1))
DRAFT = [5, 6, 7, 8, 9, 10]
ALL = np.array([NUM_STEPS], np.int32)
WHOLE = VerifiedModelDrafts(ALL, ALL, np.full(1, np.nan, np.float32))


def drafts(lens: Sequence[int]) -> DraftBatch:
    """Cache drafts with these lengths, cut from DRAFT; 0: nothing is proposed."""
    batch = DraftBatch.of_size(len(lens), len(DRAFT))
    batch.token_ids[:] = DRAFT
    batch.num_nodes[:] = lens
    return batch


def predict(
    made: ModelPredictor, slots: Sequence[int], hazards: Sequence[Sequence[float]]
) -> list[float]:
    """hazards: of each cache draft, the probability of each token if those before it are right."""
    acceptance = np.zeros((len(slots), MAX_DRAFT_LEN), np.float32)
    for row, of_draft in zip(acceptance, hazards, strict=True):
        row[: len(of_draft)] = np.cumprod(of_draft)
    batch = drafts([len(of_draft) for of_draft in hazards])
    return made.predict(np.array(slots, np.int32), batch, acceptance).tolist()


def observe(made: ModelPredictor, slot: int, committed: list[int], accepted: int | None) -> None:
    num_accepted = np.array([-1 if accepted is None else accepted], np.int32)
    made.observe(np.array([slot], np.int32), *padded([committed]), num_accepted, WHOLE)


def cycle(
    made: ModelPredictor,
    random: np.random.Generator,
    probs: Sequence[float],
    hazards: Sequence[float],
) -> int:
    """A new request has one cycle, in which the text and the model drafter's tokens are drawn.

    probs: of a token where the cache is right, wrong for the first time, after that, without any.
    """
    made.start(0)
    predict(made, [0], [hazards])
    committed: list[int] = []
    is_right, accepted = True, 0
    for step in range(NUM_STEPS + 1):
        if not hazards:
            prob = probs[3]
        elif is_right and step < len(hazards):
            is_right = bool(random.random() < hazards[step])
            prob = probs[0] if is_right else probs[1]
        else:
            is_right, prob = False, probs[2]
        committed.append(DRAFT[step] if is_right else 99)
        if step == NUM_STEPS or random.random() >= prob:
            break
        accepted += 1
    observe(made, 0, committed, accepted)
    return accepted


def test_before_anything_was_seen_it_is_the_prior() -> None:
    made = ModelPredictor(NUM_STEPS)
    made.start(3)
    for hazards in ([], [0.1], [1.0, 1.0], [0.5] * 6):
        assert predict(made, [3], [hazards]) == [pytest.approx(PRIOR)]
    figures = made.figures()
    assert (figures.num_verified, figures.mean_predicted, figures.mean_accepted) == (0, None, None)


@pytest.mark.parametrize("hazards", [[], [0.9] * 6, [0.5, 0.9, 0.9, 0.9], [0.8, 0.2], [1.0]])
def test_the_prediction_is_what_is_accepted_on_average(hazards: Sequence[float]) -> None:
    probs, random = (0.9, 0.3, 0.5, 0.6), np.random.default_rng(1)
    made = ModelPredictor(NUM_STEPS)
    mixed: list[list[float]] = [[], [0.7] * 6, [0.4, 0.8], [0.95] * 5]
    for _, of_draft in zip(range(8000), itertools.cycle(mixed), strict=False):
        cycle(made, random, probs, of_draft)
    figures = made.figures()
    learned = (
        figures.prob_if_right,
        figures.prob_if_wrong,
        figures.prob_after,
        figures.prob_without,
    )
    assert learned == pytest.approx(probs, abs=0.05)
    made.start(0)
    [predicted] = predict(made, [0], [hazards])
    mean = np.mean([cycle(ModelPredictor(NUM_STEPS), random, probs, hazards) for _ in range(8000)])
    assert predicted == pytest.approx(mean, abs=0.15)


def test_a_kind_that_was_not_seen_is_taken_for_the_others() -> None:
    made, random = ModelPredictor(NUM_STEPS), np.random.default_rng(2)
    for _ in range(2000):
        cycle(made, random, (0, 0, 0, 0.2), [])
    made.start(0)
    [without], [confident] = predict(made, [0], [[]]), predict(made, [0], [[1.0] * 6])
    assert without == pytest.approx(0.25, abs=0.05)
    assert confident == pytest.approx(without, abs=0.05)


def test_predicted_and_accepted_are_shown() -> None:
    made, random = ModelPredictor(NUM_STEPS), np.random.default_rng(3)
    accepted = [cycle(made, random, (0.9, 0.3, 0.5, 0.6), [0.7] * 6) for _ in range(900)]
    figures: ModelFigures = made.figures()
    assert figures.num_verified == 900
    assert figures.mean_accepted == pytest.approx(np.mean(accepted), abs=0.1)
    assert figures.mean_predicted == pytest.approx(figures.mean_accepted, abs=0.15)


def test_without_probabilities_it_does_not_look_at_the_cache_draft() -> None:
    made, random = ModelPredictor(NUM_STEPS), np.random.default_rng(4)
    for of_draft in [[], [0.7] * 6] * 2000:
        cycle(made, random, (0.9, 0.3, 0.5, 0.6), of_draft)
    made.start(0)
    [without] = predict(made, [0], [[]])
    [predicted] = made.predict(np.array([0], np.int32), drafts([6]), None).tolist()
    assert predicted == without


def test_a_request_has_its_own_ratio_and_the_next_in_its_slot_none() -> None:
    made, random = ModelPredictor(NUM_STEPS), np.random.default_rng(5)
    for _ in range(2000):
        cycle(made, random, (0.9, 0.9, 0.9, 0.9), [])
    for slot in (1, 2):
        made.start(slot)
    for _ in range(60):
        predict(made, [1], [[]])
        observe(made, 1, [9], 0)
        predict(made, [1], [[]])
        observe(made, 1, [9], None)  # not verified, so nothing is learned
    [of_request], [of_others] = predict(made, [1], [[]]), predict(made, [2], [[]])
    assert of_request < 0.5 * of_others
    made.start(1)
    assert predict(made, [1], [[]]) == [of_others]


def test_no_more_is_predicted_than_there_are_steps() -> None:
    made = ModelPredictor(NUM_STEPS)
    made.start(0)
    for _ in range(500):
        predict(made, [0], [[]])
        observe(made, 0, [1] * (NUM_STEPS + 1), NUM_STEPS)
    assert predict(made, [0], [[0.5] * 3]) == [pytest.approx(NUM_STEPS, abs=0.2)]
    assert predict(made, [0], [[0.5] * 3])[0] <= NUM_STEPS


def test_a_row_does_not_depend_on_the_others() -> None:
    made, random = ModelPredictor(NUM_STEPS), np.random.default_rng(6)
    for _ in range(50):
        cycle(made, random, (0.9, 0.3, 0.5, 0.6), [0.7] * 6)
    for slot in range(9):
        made.start(slot)
    hazards = [[0.1 * slot] * (slot % 7) for slot in range(9)]
    together = predict(made, range(9), hazards)
    assert together == [
        value for slot in range(9) for value in predict(made, [slot], [hazards[slot]])
    ]


def test_parts_of_drafts_are_learned_from_as_the_definitions_say() -> None:
    made, random = ModelPredictor(NUM_STEPS, [3, 7]), np.random.default_rng(7)
    right, seen = np.zeros(4), np.zeros(4)  # where the cache is right, wrong, after that, without
    sum_accepted, sum_predicted = np.zeros(3), np.zeros(3)
    slots = np.arange(4, dtype=np.int32)  # the last one is never verified
    for slot in slots.tolist():
        made.start(slot)
    for _ in range(400):
        lens = random.integers(0, 4, 4)
        predict(made, slots.tolist(), [[0.7] * length for length in lens])
        sizes = random.choice([3, 7], 4).astype(np.int32)
        steps = random.integers(1, NUM_STEPS + 1, 4).astype(np.int32)
        accepted = random.integers(0, np.minimum(sizes, steps) + 1)
        is_verified = (random.random(4) < 0.7) & (slots < 3)
        agreed = [int(random.integers(0, length + 1)) for length in lens]
        committed = [
            ([*DRAFT[:a], 99, 98, 97, 96])[: num + 1]
            for a, num in zip(agreed, accepted, strict=True)
        ]
        predicted = random.uniform(0.1, 3, 4).astype(np.float32)
        for slot in np.flatnonzero(is_verified).tolist():
            odds = np.exp(SIZE_EFFECT * np.log2(sizes[slot] / 7))
            common = min(agreed[slot], int(accepted[slot]) + 1)
            num_tokens = min(len(committed[slot]), sizes[slot], steps[slot], accepted[slot] + 1)
            for token in range(num_tokens):
                if lens[slot] == 0:
                    kind = 3
                elif token < common:
                    kind = 0
                else:
                    kind = 1 if token == common < lens[slot] else 2
                is_right = token < accepted[slot]
                right[kind] = 0.9995 * right[kind] + is_right
                seen[kind] = 0.9995 * seen[kind] + (1 if is_right else odds)
            ratio = (sum_accepted[slot] + 16) / (sum_predicted[slot] + 16)
            sum_accepted[slot] = 0.98 * sum_accepted[slot] + accepted[slot]
            sum_predicted[slot] = 0.98 * sum_predicted[slot] + predicted[slot] / ratio
        num_accepted = np.where(is_verified, accepted, -1).astype(np.int32)
        made.observe(
            slots, *padded(committed), num_accepted, VerifiedModelDrafts(sizes, steps, predicted)
        )
    figures = made.figures()
    of_all = (right.sum() + 0.9 * 16) / (seen.sum() + 16)
    learned = [
        figures.prob_if_right,
        figures.prob_if_wrong,
        figures.prob_after,
        figures.prob_without,
    ]
    assert learned == pytest.approx((right + of_all * 16) / (seen + 16), rel=1e-9)
    *of_requests, of_new = predict(made, slots.tolist(), [[]] * 4)
    ratios = (sum_accepted + 16) / (sum_predicted + 16)
    wanted = np.minimum(of_new * ratios, NUM_STEPS)
    assert of_requests == pytest.approx(wanted.tolist(), rel=1e-6)
    assert np.ptp(ratios) > 0.01


def test_a_cycle_whose_sizes_were_predicted_teaches_as_any_other() -> None:
    def figures(method: str) -> ModelFigures:
        made = ModelPredictor(NUM_STEPS)
        made.start(0)
        for num_accepted in (3, 0, 2):
            acceptance = np.full((1, MAX_DRAFT_LEN), 0.5, np.float32)
            getattr(made, method)(np.zeros(1, np.int32), drafts([4]), acceptance)
            observe(made, 0, [*DRAFT[:num_accepted], 99], num_accepted)
        return made.figures()

    assert figures("predict_sizes") == figures("predict")


def test_slots_that_were_not_started_are_refused() -> None:
    made = ModelPredictor(NUM_STEPS)
    for slot in (0, -1):
        with pytest.raises(ValueError, match="not started"):
            predict(made, [slot], [[]])
        with pytest.raises(ValueError, match="not started"):
            observe(made, slot, [1], 0)
    with pytest.raises(ValueError, match="must not be negative"):
        made.start(-1)
