"""What the allocator keeps from step to step, against the definitions: the pace of steps and
requests, pinned requests, and looks at drafts that nothing was heard of for long."""

import numpy as np
import numpy.typing as npt
import pytest

from sglang_hvd.allocation import (
    Allocation,
    DrafterChoices,
    PredictedDrafts,
    StepAllocator,
    allocator,
)
from sglang_hvd.costs import StepCosts
from tests.allocation import pace_oracle
from tests.allocation.fixed_drafts import of_model_only

SIZES, STEPS, WIDTHS = (1, 3), (1, 2), (1, 2, 4, 7)
NUM_SLOTS, MAX_NODES, LOOK_AFTER = 6, 5, 3

Random = np.random.Generator


@pytest.fixture(autouse=True)
def _looks_are_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_LOOK_AFTER", LOOK_AFTER)


def costs(random: Random) -> StepCosts:
    plain, per_node, of_round = random.uniform(1, 9), random.uniform(0, 3), random.uniform(0, 9)
    return StepCosts(
        about="made up",
        batch_sizes=(1, 8),
        widths=(1, 8),
        verify=tuple(tuple(plain + per_node * n * w for w in (1, 8)) for n in (1, 8)),
        draft_round=(of_round, 2 * of_round),
        draft_extend=((0.1, 0.2), (0.3, 0.9)),
    )


def odds(random: Random, num: int) -> PredictedDrafts:
    """Of drafts that are likely or not, each by itself; every third request has no cache draft."""
    likely = random.choice([0.02, 0.5, 0.95], (2, num))
    probs = np.cumprod(random.random((num, MAX_NODES)) ** 0.2 * likely[0, :, None], axis=1)
    tokens = random.random((num, len(SIZES), STEPS[-1])) ** 0.2 * likely[1, :, None, None]
    reaches = np.sort(np.cumprod(tokens, axis=2), axis=1).astype(np.float32)
    return PredictedDrafts(
        probs.astype(np.float32),
        np.tile(np.arange(1, MAX_NODES + 1, dtype=np.int32), (num, 1)),
        (random.integers(1, MAX_NODES + 1, num) * (random.random(num) < 2 / 3)).astype(np.int32),
        reaches,
        reaches,
    )


def made(table: StepCosts) -> StepAllocator:
    built = StepAllocator(table, widths=WIDTHS, drafters=[DrafterChoices(SIZES, STEPS)])
    for slot in range(NUM_SLOTS):
        built.start(slot)
    return built


def time(table: StepCosts, found: Allocation) -> float:
    """Of the step, with draft-extend."""
    num = len(found.num_host)
    ms = table.verify_ms(num, [found.width])[0] + table.draft_extend_ms(num, [found.width])[0]
    return float(ms + table.draft_ms([int((found.num_model > 0).sum())], found.num_steps)[0])


@pytest.mark.parametrize("seed", range(20))
def test_steps_are_as_wide_as_their_drafts_and_set_the_pace_of_later_ones(seed: int) -> None:
    random = np.random.default_rng(seed)
    table = costs(random)
    built, oracle = made(table), pace_oracle.Pace()
    for slot in range(NUM_SLOTS):
        oracle.start(slot)
    for _ in range(120):
        num = int(random.integers(1, NUM_SLOTS + 1))
        slots = random.permutation(NUM_SLOTS)[:num].astype(np.int32)
        given = odds(random, num)
        model_only = random.random(num) < random.choice([0, 0, 0.4, 1])
        found = built.allocate(slots, given, of_model_only(model_only, SIZES[-1]))
        used = found.num_host + found.num_model
        assert found.width == min(width for width in WIDTHS if width > used.max())
        assert found.max_host == found.num_host.max()
        assert (found.num_host <= given.num_nodes).all()
        assert (found.num_host[model_only] == 0).all()
        assert (found.num_model[model_only] == SIZES[-1]).all()
        assert (found.model_size[model_only] == SIZES[-1]).all()
        assert (found.model_predicted[model_only] == 0).all()
        assert not model_only.any() or found.num_steps == STEPS[-1]
        plain_ms = float(table.verify_ms(num, [1])[0] + table.draft_extend_ms(num, [1])[0])
        oracle.see_step(time(table, found), plain_ms)
        committed = random.integers(0, 9, num).astype(np.int32)
        built.observe(slots, committed)
        oracle.see_tokens(slots, committed)
        pace = built.native.pace
        assert pace.price(num, plain_ms) == pytest.approx(oracle.price(num, plain_ms), rel=1e-9)
        values = np.empty(num)
        pace.write_token_values(slots, values)
        assert values == pytest.approx(oracle.token_values(slots), rel=1e-9)


FREE = StepCosts(
    about="made up: nodes and rounds take no time",
    batch_sizes=(1, 8),
    widths=(1, 8),
    verify=((5.0, 5.0), (5.0, 5.0)),
    draft_round=(0.0, 0.0),
    draft_extend=((0.0, 0.0), (0.0, 0.0)),
)


def unlikely(num_nodes: list[int]) -> PredictedDrafts:
    num = len(num_nodes)
    reaches = np.full((num, len(SIZES), STEPS[-1]), 0.01, np.float32)
    return PredictedDrafts(
        np.full((num, MAX_NODES), 0.01, np.float32),
        np.tile(np.arange(1, MAX_NODES + 1, dtype=np.int32), (num, 1)),
        np.array(num_nodes, np.int32),
        reaches,
        reaches,
    )


def steps(
    built: StepAllocator, given: PredictedDrafts, model_only: npt.NDArray[np.bool_], num_steps: int
) -> list[tuple[list[int], list[int]]]:
    slots = np.arange(len(given.num_nodes), dtype=np.int32)
    limits = of_model_only(model_only, SIZES[-1])
    found = [built.allocate(slots, given, limits) for _ in range(num_steps)]
    return [(each.num_host.tolist(), each.num_model.tolist()) for each in found]


@pytest.mark.parametrize(
    ("num_nodes", "pinned", "looks"),
    [
        ([2, 2], [False, False], [([0, 1], [1, 0]), ([1, 0], [0, 1])]),
        # Not at one that has no draft, nor at one that may not verify it.
        ([2, 0, 2], [True, False, False], [([0, 0, 1], [3, 1, 0])] * 2),
        (
            [2, 2, 0, 2],
            [True, False, False, False],
            [([0, 0, 0, 1], [3, 1, 1, 0]), ([0, 1, 0, 0], [3, 0, 1, 1])],
        ),
    ],
)
def test_a_look_at_a_cache_draft_is_in_the_place_of_the_model_drafters(
    num_nodes: list[int], pinned: list[bool], looks: list[tuple[list[int], list[int]]]
) -> None:
    # The model drafter's drafts pay for everyone, and a request verifies one draft.
    given = unlikely(num_nodes)
    given.model_probs[:], given.model_probs_if_right[:] = 0.99, 0.99
    built = StepAllocator(FREE, widths=(4,), drafters=[DrafterChoices(SIZES, STEPS)], merges=False)
    for slot in range(len(num_nodes)):
        built.start(slot)
    found = steps(built, given, np.array(pinned), 12)
    assert [(cache, model) for cache, model in found if any(cache)][:2] == looks
    # Unless the step is one that looks at the model drafter in another number of steps.
    first = [any(cache) for cache, _ in found].index(True)
    assert first == LOOK_AFTER + (not any(pinned))
