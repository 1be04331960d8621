"""The allocator against every possible choice, and what a server needs of it."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hvd.allocation import (
    Allocation,
    DrafterChoices,
    DraftExtend,
    PredictedDrafts,
    RowLimits,
    StepAllocator,
    widths_that_save,
)
from sglang_hvd.costs import StepCosts
from tests.allocation.fixed_drafts import of_model_only

WIDTHS, SIZES, STEPS = (1, 2, 4, 7), (1, 3), (1, 2)
MAX_NODES = 4


def costs(
    *, plain: float = 5.0, per_node: float = 0.1, of_round: float = 0.5, extend: float = 0.2
) -> StepCosts:
    """A step of n requests and w nodes each: plain + per_node n w."""
    verify = tuple(tuple(plain + per_node * n * w for w in (1, 8)) for n in (1, 4))
    return StepCosts(
        about="made up",
        batch_sizes=(1, 4),
        widths=(1, 8),
        verify=verify,
        draft_round=(of_round, 2 * of_round),
        draft_extend=((extend, extend), (extend, extend)),
    )


def odds(hazards: list[list[float]], model: list[tuple[float, float]]) -> PredictedDrafts:
    """Chains by the probability of each token after those before it. model: probability of a token
    of the model drafter's draft, and where the cache draft is right; half as likely, in odds, in
    the smaller size."""
    num = len(hazards)
    probs = np.zeros((num, MAX_NODES), np.float32)
    for row, of_row in zip(probs, hazards, strict=True):
        row[: len(of_row)] = np.cumprod(of_row)
    reaches = np.zeros((2, num, len(SIZES), STEPS[-1]), np.float32)
    for i, of_request in enumerate(model):
        for kind, prob in enumerate(of_request):
            smaller = prob / 2 / (prob / 2 + 1 - prob)
            reaches[kind, i, 0] = [smaller, 0]  # a tree of one node has one level
            reaches[kind, i, 1] = [prob, prob**2]
    # Joint probabilities cannot be larger than that of either.
    for i in range(num):
        for size, depth in itertools.product(range(len(SIZES)), range(STEPS[-1])):
            if probs[i, depth] > 0:
                bound = reaches[0, i, size, depth] / probs[i, depth]
                reaches[1, i, size, depth] = min(reaches[1, i, size, depth], bound, 1)
    return PredictedDrafts(
        probs,
        np.tile(np.arange(1, MAX_NODES + 1, dtype=np.int32), (num, 1)),
        np.array(list(map(len, hazards)), np.int32),
        reaches[0],
        reaches[1],
    )


def expected(given: PredictedDrafts, row: int, num_cache: int, size: int, num_steps: int) -> float:
    """Sum over the depths of the probability that either draft is right up to there."""
    probs, depths = given.probs[row, :num_cache], given.depths[row, :num_cache]
    total = float(probs.sum())
    if not size:
        return total
    place = SIZES.index(size)
    for step in range(num_steps):
        cache = min(float(probs[depths == step + 1].sum()), 1.0)
        both = cache * float(given.model_probs_if_right[row, place, step])
        total += max(float(given.model_probs[row, place, step]) - both, 0.0)
    return total


@dataclass(frozen=True)
class Worth:
    """Of a token of each request, and of a millisecond, in cycles."""

    tokens: list[float]
    ms: float

    def score(self, gained: list[float], ms: float) -> float:
        tokens = sum(value * tokens for value, tokens in zip(self.tokens, gained, strict=True))
        return tokens - self.ms * ms


def with_pinned(given: PredictedDrafts, num: int) -> PredictedDrafts:
    """Requests behind the others whose cache drafts look sure, which shall not matter."""
    rows = [getattr(given, name)[:1] for name in PredictedDrafts.__dataclass_fields__]
    more = [np.concatenate([row] * num) if num else row[:0] for row in rows]
    more[0] = np.ones_like(more[0])
    return PredictedDrafts(
        *(
            np.concatenate([getattr(given, name), of_pinned])
            for name, of_pinned in zip(PredictedDrafts.__dataclass_fields__, more, strict=True)
        )
    )


hazard = st.floats(0, 1, width=16)
chains = st.lists(hazard, max_size=MAX_NODES)


@st.composite
def batches(draw: st.DrawFn) -> PredictedDrafts:
    """Chains and trees: nodes by falling probability, none before its parent."""
    num = draw(st.integers(1, 2))
    given = odds(
        [draw(chains) for _ in range(num)], [(draw(hazard), draw(hazard)) for _ in range(num)]
    )
    for row in range(num):
        if draw(st.booleans()):
            for node in range(1, MAX_NODES):
                given.depths[row, node] = draw(
                    st.integers(1, 1 + int(given.depths[row, :node].max()))
                )
    return given


@settings(max_examples=150, deadline=None)
@given(
    batches(),
    st.floats(0.5, 10),
    st.floats(0, 1),
    st.floats(0, 3),
    st.sampled_from([(3, 3), (1, 3), (2, 3)]),
    st.booleans(),
    st.tuples(st.integers(1, 30), st.integers(1, 30)),
    st.integers(0, 2),
)
def test_no_other_choice_makes_more_progress_in_its_time(
    given: PredictedDrafts,
    plain: float,
    per_node: float,
    of_round: float,
    max_nodes: tuple[int, int],
    merges: bool,
    lately: tuple[int, int],
    num_pinned: int,
) -> None:
    table = costs(plain=plain, per_node=per_node, of_round=of_round)
    num = len(given.num_nodes)
    num_all = num + num_pinned
    made = StepAllocator(
        table,
        widths=WIDTHS,
        drafters=[DrafterChoices(SIZES, STEPS, max_nodes)],
        merges=merges,
    )
    for slot in range(num_all):
        made.start(slot)
    made.observe(slots(num), np.array(lately[:num], np.int32))
    limits = of_model_only(np.arange(num_all) >= num, SIZES[-1])
    found = made.allocate(slots(num_all), with_pinned(given, num_pinned), limits)
    has_nodes = np.minimum(found.model_size, max_nodes[STEPS.index(found.num_steps)])
    assert found.num_model[:num].tolist() == has_nodes[:num].tolist()
    assert (found.num_host + found.num_model).max() < found.width
    assert merges or not (found.num_host * found.num_model).any()

    def outcome(
        choices: list[tuple[int, int]], steps: int, width: int
    ) -> tuple[list[float], float]:
        drafting = num_pinned + sum(size > 0 for _, size in choices)
        ms = table.verify_ms(num_all, [width])[0] + table.draft_extend_ms(num_all, [width])[0]
        ms += table.draft_ms([drafting], steps)[0]
        return [expected(given, row, *choice, steps) for row, choice in enumerate(choices)], float(
            ms
        )

    possible = []
    for width, (steps, most) in itertools.product(WIDTHS, zip(STEPS, max_nodes, strict=True)):
        if num_pinned and (width <= SIZES[-1] or steps < STEPS[-1]):
            continue  # they draft in full
        of_request = [
            [
                (num_cache, size)
                for num_cache in range(int(given.num_nodes[row]) + 1)
                for size in (0, *SIZES)
                if num_cache + min(size, most) < width
                if merges or not (num_cache and size)
            ]
            for row in range(num)
        ]
        possible += [outcome(list(c), steps, width) for c in itertools.product(*of_request)]
    choices = zip(found.num_host[:num].tolist(), found.model_size[:num].tolist(), strict=True)
    reached = outcome(list(choices), found.num_steps, found.width)
    plain_ms = table.verify_ms(num_all, [1])[0] + table.draft_extend_ms(num_all, [1])[0]
    # 2 tokens a cycle, as they all begin, and a tenth of what came in one.
    worth = Worth([1 / (1.8 + tokens / 10) for tokens in lately[:num]], num_all / float(plain_ms))
    assert worth.score(*reached) > max(worth.score(*other) for other in possible) - 1e-4


@pytest.mark.parametrize("num", [5, 12])
@pytest.mark.parametrize("of_round", [0.1, 2.0, 20.0])
def test_in_larger_batches_too_none_does(num: int, of_round: float) -> None:
    """For each width and number of steps the best is known: what the model drafter adds to a
    request depends on no other, so it drafts for as many of those that gain most as pay."""
    random = np.random.default_rng(num)
    table = costs(per_node=0.3, of_round=of_round)

    def time(width: int, steps: int, drafting: int) -> float:
        ms = table.verify_ms(num, [width])[0] + table.draft_extend_ms(num, [width])[0]
        return float(ms + table.draft_ms([drafting], steps)[0])

    for _ in range(60):
        hazards = [random.random(random.integers(0, MAX_NODES + 1)).tolist() for _ in range(num)]
        of_model = [(p, min(1.0, 1.5 * p)) for p in random.random(num).tolist()]
        given = odds(hazards, of_model)
        made = StepAllocator(table, widths=WIDTHS, drafters=[DrafterChoices(SIZES, STEPS)])
        for slot in range(num):
            made.start(slot)
        lately = random.integers(1, 30, num).astype(np.int32)
        made.observe(slots(num), lately)
        found = made.allocate(slots(num), given)
        plain_ms = float(table.verify_ms(num, [1])[0] + table.draft_extend_ms(num, [1])[0])
        worth = Worth((1 / (1.8 + lately / 10)).tolist(), num / plain_ms)

        best = -np.inf
        for width, steps in itertools.product(WIDTHS, STEPS):
            room = [min(int(n), width - 1) for n in given.num_nodes]
            alone = [expected(given, row, room[row], 0, steps) for row in range(num)]
            beside = [
                max(
                    (
                        expected(given, row, min(room[row], width - 1 - size), size, steps)
                        for size in SIZES
                        if size < width
                    ),
                    default=0.0,
                )
                for row in range(num)
            ]
            gains = [
                value * (both - one)
                for value, both, one in zip(worth.tokens, beside, alone, strict=True)
            ]
            order = np.argsort(gains)[::-1].tolist()
            for drafting in range(num + 1):
                drafts = set(order[:drafting])
                gained = [beside[i] if i in drafts else alone[i] for i in range(num)]
                best = max(best, worth.score(gained, time(width, steps, drafting)))
        chosen = zip(found.num_host.tolist(), found.model_size.tolist(), strict=True)
        reached = [expected(given, i, *choice, found.num_steps) for i, choice in enumerate(chosen)]
        drafting = int(np.count_nonzero(found.num_model))
        ms = time(found.width, found.num_steps, drafting)
        assert worth.score(reached, ms) > best - 1e-4


def allocator(
    table: StepCosts, *, widths: tuple[int, ...] = WIDTHS, steps: tuple[int, ...] = STEPS
) -> StepAllocator:
    made = StepAllocator(table, widths=widths, drafters=[DrafterChoices(SIZES, steps)])
    for slot in range(4):
        made.start(slot)
    return made


def slots(num: int) -> Any:
    return np.arange(num, dtype=np.int32)


def of(found: Allocation) -> tuple[list[int], list[int]]:
    return found.num_host.tolist(), found.num_model.tolist()


SURE, HOPELESS = [1.0] * 4, [0.01] * 4


def test_a_sure_cache_draft_leaves_the_model_drafter_out() -> None:
    found = allocator(costs()).allocate(slots(1), odds([SURE], [(0.9, 0.9)]))
    assert of(found) == ([4], [0])


def test_only_the_request_that_needs_it_drafts_with_the_model() -> None:
    found = allocator(costs()).allocate(slots(2), odds([SURE, []], [(0.9, 0.9), (0.9, 0.9)]))
    assert of(found) == ([4, 0], [0, 3])


def test_an_unsure_cache_draft_is_verified_beside_the_model_draft() -> None:
    found = allocator(costs(per_node=0.001)).allocate(slots(1), odds([[0.5] * 3], [(0.6, 0.7)]))
    assert of(found) == ([3], [3])
    assert found.width == 7


def test_nothing_that_pays_is_a_plain_step() -> None:
    found = allocator(costs(per_node=3.0)).allocate(slots(1), odds([HOPELESS], [(0.1, 0.1)]))
    assert of(found) == ([0], [0])
    assert found.width == 1


def test_a_step_is_no_wider_than_its_drafts() -> None:
    found = allocator(costs(per_node=0.1)).allocate(slots(1), odds([[0.9]], [(0.01, 0.01)]))
    assert of(found) == ([1], [0])
    assert found.width == 2


def test_as_nodes_get_dearer_the_step_narrows() -> None:
    drafts = odds([[0.9] * 4] * 2, [(0.6, 0.6)] * 2)
    widths = [
        allocator(costs(per_node=per_node)).allocate(slots(2), drafts).width
        for per_node in (0.0, 0.1, 0.3, 1.0, 3.0, 9.0)
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 7
    assert widths[-1] == 1


@pytest.mark.parametrize("num", [1, 4])
def test_contexts_are_a_part_of_every_step(num: int) -> None:
    random, table = np.random.default_rng(num), costs(per_node=0.3)
    by_context = allocator(table.model_copy(update={"context": 2.0}))
    longer = allocator(costs(plain=5.0 + 6.0, per_node=0.3))
    widths = set()
    for step in range(200):
        given = odds(random.random((num, 4)).tolist(), random.random((num, 2)).tolist())
        found = by_context.allocate(slots(num), given, num_context=3000)
        wanted = longer.allocate(slots(num), given)
        assert (of(found), found.width) == (of(wanted), wanted.width)
        widths.add(found.width)
        if step % 3 == 0:
            found_wait, wanted_wait = (
                by_context.wants_drafts(slots(num), given, num_context=3000),
                longer.wants_drafts(slots(num), given),
            )
            assert found_wait == wanted_wait
        for each in (by_context, longer):
            each.observe(slots(num), wanted.num_host + np.int32(1))
    assert len(widths) > 2


def test_the_longer_the_contexts_the_more_nodes_pay() -> None:
    made, drafts = costs(per_node=1.0).model_copy(update={"context": 10.0}), [[0.8] * 4]
    widths = [
        allocator(made).allocate(slots(1), odds(drafts, [(0.1, 0.1)]), num_context=num).width
        for num in (0, 1000, 10_000)
    ]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


def test_a_pinned_request_drafts_with_all_of_the_model_tree_and_nothing_else() -> None:
    made, given = allocator(costs()), odds([SURE, SURE], [(0.0, 0.0)] * 2)
    found = made.allocate(slots(2), given, of_model_only(np.array([True, False]), SIZES[-1]))
    assert of(found) == ([0, 4], [3, 0])
    assert found.num_steps == STEPS[-1]


def limits(fixed: list[tuple[int, int] | None], max_nodes: list[int] | None = None) -> RowLimits:
    """fixed: nodes of the host's draft and of the model drafter's; None: not fixed."""
    num_host, num_model = np.array([of or (0, 0) for of in fixed], np.int32).T
    return RowLimits(
        np.array([of is not None for of in fixed]),
        np.ascontiguousarray(num_host),
        np.ascontiguousarray(num_model),
        np.array(max_nodes or [2**30] * len(fixed), np.int32),
    )


def test_a_request_with_fixed_drafts_verifies_them_whatever_they_gain() -> None:
    made, given = allocator(costs(per_node=50)), odds([HOPELESS, SURE, SURE], [(0.0, 0.0)] * 3)
    found = made.allocate(slots(3), given, limits([(3, 0), (0, 0), (0, 2)]))
    assert of(found) == ([3, 0, 0], [0, 0, 2])
    assert found.model_size.tolist() == [0, 0, SIZES[-1]]
    assert (found.width, found.max_host, found.num_steps) == (4, 3, STEPS[-1])


def test_a_request_without_drafts_changes_nothing_for_the_others() -> None:
    given = odds([SURE, SURE, SURE], [(0.9, 0.5)] * 3)
    without, alone = allocator(costs()), allocator(costs())
    silent = odds([SURE, [], SURE], [(0.9, 0.5), (0.0, 0.0), (0.9, 0.5)])
    for _ in range(300):
        found = without.allocate(slots(3), given, limits([None, (0, 0), None]))
        expected = alone.allocate(slots(3), silent)
        if not expected.num_model[1]:  # a look at the model drafter may be that request's turn
            assert of(found) == of(expected)
        assert (found.num_host[1], found.num_model[1]) == (0, 0)


def test_no_request_explores_where_none_may_verify_drafts() -> None:
    made, given = allocator(costs()), odds([SURE, SURE], [(0.9, 0.9)] * 2)
    found = [made.allocate(slots(2), given, limits([(0, 0)] * 2)) for _ in range(600)]
    assert {each.width for each in found} == {1}
    assert not made.wants_drafts(slots(2), given, limits([(0, 0)] * 2))
    assert made.wants_drafts(slots(2), given, limits([(1, 0), (0, 0)]))


@given(
    batches(),
    st.booleans(),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.floats(0, 1),
)
def test_all_drafts_of_a_request_stay_within_its_limit(
    given: PredictedDrafts, merges: bool, max_nodes: list[int], per_node: float
) -> None:
    num = len(given.num_nodes)
    limited, unlimited, free = (
        StepAllocator(
            costs(per_node=per_node),
            widths=WIDTHS,
            drafters=[DrafterChoices(SIZES, STEPS)],
            merges=merges,
        )
        for _ in range(3)
    )
    for made, slot in itertools.product((limited, unlimited, free), range(num)):
        made.start(slot)
    most = max_nodes[:num]
    for _ in range(3):
        found = limited.allocate(slots(num), given, limits([None] * num, most))
        assert ((found.num_host + found.num_model) <= most).all()
        found = unlimited.allocate(slots(num), given, limits([None] * num))
        assert of(found) == of(free.allocate(slots(num), given))


@pytest.mark.parametrize(
    ("fixed", "fault"),
    [
        ((9, 0), "longer than the draft"),
        ((0, 4), "larger than its sizes"),
        ((-1, 0), "longer than the draft"),
        ((4, 3), "no room for fixed drafts"),
    ],
)
def test_fixed_drafts_that_cannot_be_verified_are_refused(
    fixed: tuple[int, int], fault: str
) -> None:
    made, given = allocator(costs()), odds([SURE], [(0.0, 0.0)])
    with pytest.raises(ValueError, match=fault):
        made.allocate(slots(1), given, limits([fixed]))


def test_the_model_drafter_is_looked_at_now_and_then_for_each_in_turns() -> None:
    made = allocator(costs(of_round=50, extend=0))
    given = odds([SURE, SURE], [(0.1, 0.1)] * 2)
    looks = {}
    for step in range(1100):
        _, num_model = of(made.allocate(slots(2), given))
        if any(num_model):
            looks[step] = [size > 0 for size in num_model].index(True)
            assert sum(size > 0 for size in num_model) == 1
    assert looks == {256: 1, 513: 0, 770: 1, 1027: 0}


def test_each_number_of_steps_is_run_now_and_then() -> None:
    # Rounds seem so dear that drafts have the fewest steps, which no time of theirs could mend.
    made = allocator(costs(of_round=3.0, extend=0))
    given = odds([[], []], [(0.9, 0.9)] * 2)
    slots_of_two = slots(2)
    found = [made.allocate(slots_of_two, given) for _ in range(1100)]
    usual = found[0].num_steps
    assert found[0].num_model.all()
    looks = {step: each.num_steps for step, each in enumerate(found) if each.num_steps != usual}
    assert set(looks.values()) == set(STEPS) - {usual}
    assert all(later - earlier > 256 for earlier, later in itertools.pairwise(looks))
    assert all(found[step].num_model.any() for step in looks)


def test_each_width_is_run_now_and_then_up_to_the_next_above_those_that_pay() -> None:
    # Four tokens are sure, and a fifth node costs more than it can bring.
    verify = ((5.0, 5.1, 5.2, 50.0),) * 2
    table = costs(of_round=50, extend=0).model_copy(
        update={"widths": WIDTHS, "verify": verify, "draft_extend": ((0.0,) * 4,) * 2}
    )
    made, given = allocator(table), odds([SURE, SURE], [(0.1, 0.1)] * 2)
    found = [made.allocate(slots(2), given) for _ in range(2500)]
    usual = found[0].width
    looks = {
        step: each.width
        for step, each in enumerate(found)
        if each.width != usual and not each.num_model.any()
    }
    assert usual == 4
    assert set(looks.values()) == {2, 7}
    assert all(later - earlier > 256 for earlier, later in itertools.pairwise(looks))
    # One that no draft fills keeps no other from being run.
    made, given = allocator(table), odds([SURE[:3], []], [(0.1, 0.1)] * 2)
    found = [made.allocate(slots(2), given) for _ in range(3000)]
    assert sum(each.width == 2 for each in found) >= 3
    # Where the widest alone is best, too: the others seem to take as long, and may not.
    verify = ((5.0, 6.0, 6.0, 6.0),) * 2
    alike = table.model_copy(update={"verify": verify})
    made, given = allocator(alike), odds([SURE, SURE], [(0.1, 0.1)] * 2)
    found = [made.allocate(slots(2), given) for _ in range(2500)]
    assert found[0].width == 7
    assert {each.width for each in found if not each.num_model.any()} == {2, 4, 7}
    # Where nothing pays only the narrowest is.
    dear = costs(per_node=50, of_round=50)
    made = allocator(dear)
    given = odds([SURE, SURE], [(0.1, 0.1)] * 2)
    assert {made.allocate(slots(2), given).width for _ in range(2500)} == {1, 2}


def test_a_request_that_must_draft_does_not_keep_the_model_drafter_from_being_looked_at() -> None:
    made = allocator(costs(of_round=50, extend=0))
    given = odds([SURE, SURE], [(0.1, 0.1)] * 2)
    limits = of_model_only(np.array([True, False]), SIZES[-1])
    drafting = [of(made.allocate(slots(2), given, limits))[1] for _ in range(300)]
    assert all(of_pinned == SIZES[-1] for of_pinned, _ in drafting)
    assert [step for step, (_, of_free) in enumerate(drafting) if of_free] == [256]


def test_a_cache_draft_is_looked_at_now_and_then_for_each_in_turns() -> None:
    made = allocator(costs(per_node=50, of_round=50))
    given = odds([HOPELESS, [], HOPELESS], [(0.0, 0.0)] * 3)
    looks = {}
    for step in range(1600):
        num_cache, _ = of(made.allocate(slots(3), given))
        if any(num_cache):
            looks[step] = num_cache
    # Beside these, a look at the model drafter may verify cache drafts in the room it leaves.
    looks = {step: found for step, found in looks.items() if sum(found) == 1}
    assert len(looks) >= 4
    assert all(later - earlier > 256 for earlier, later in itertools.pairwise(looks))
    assert {tuple(found) for found in looks.values()} == {(1, 0, 0), (0, 0, 1)}


def test_a_cache_draft_that_is_due_to_be_looked_at_may_be_gone() -> None:
    made = allocator(costs(per_node=50, of_round=50))
    hopeless, nothing = odds([HOPELESS], [(0.0, 0.0)]), odds([[]], [(0.0, 0.0)])
    for _ in range(257):  # the last one looks at the model drafter instead
        made.allocate(slots(1), hopeless)
    assert of(made.allocate(slots(1), nothing)) == ([0], [0])
    assert of(made.allocate(slots(1), hopeless)) == ([1], [0])


def test_without_cache_drafts_none_is_looked_at() -> None:
    made = allocator(costs(per_node=50))
    given = odds([[], []], [(0.0, 0.0)] * 2)
    assert not any(made.allocate(slots(2), given).num_host.any() for _ in range(600))


def test_a_postponed_draft_extend_is_paid_for_by_the_requests_that_draft() -> None:
    unsure = odds([[0.4, 0.3]], [(0.8, 0.9)])
    # In every step for all: then drafting costs no more for it.
    dear = costs(of_round=0.0, extend=30.0, per_node=0.0)
    assert of(allocator(dear).allocate(slots(1), unsure)) == ([2], [3])
    postponed = StepAllocator(
        dear,
        widths=WIDTHS,
        drafters=[DrafterChoices(SIZES, STEPS)],
        draft_extend=DraftExtend.WHEN_DRAFTING,
    )
    postponed.start(0)
    assert of(postponed.allocate(slots(1), unsure)) == ([2], [0])
    cheap = costs(of_round=0.0, extend=0.1, per_node=0.0)
    postponed.use_costs(cheap)
    assert of(postponed.allocate(slots(1), unsure)) == ([2], [3])


def test_widths_that_save_follow_the_most_requests() -> None:
    assert [widths_that_save(32, most) for most in (1, 2, 4, 16, 48, 256)] == [
        (),
        (),
        (16,),
        (4, 8, 16),
        (1, 2, 4, 8, 16),
        (1, 2, 4, 8, 16),
    ]


def test_of_fewer_widths_the_narrowest_that_holds_the_drafts_is_left() -> None:
    table, given = costs(per_node=0.1), odds([[0.9]], [(0.01, 0.01)])
    assert allocator(table).allocate(slots(1), given).width == 2
    assert allocator(table, widths=(1, 7)).allocate(slots(1), given).width == 7


def test_steps_of_more_than_two_requests_keep_to_the_base_width() -> None:
    made = StepAllocator(
        costs(per_node=0), widths=WIDTHS, base_width=4, drafters=[DrafterChoices(SIZES, STEPS)]
    )
    long = np.full((4, 4), 0.9).tolist()
    for slot in range(4):
        made.start(slot)
    for num, width, verified in ((1, 7, 4), (2, 7, 4), (3, 4, 3), (4, 4, 3)):
        assert made.widest(num) == width
        found = made.allocate(slots(num), odds(long[:num], [(0.0, 0.0)] * num))
        assert (found.width, *of(found)) == (width, [verified] * num, [0] * num)
    pinned = of_model_only(np.ones(3, np.bool_), SIZES[-1])
    assert of(made.allocate(slots(3), odds(long[:3], [(0.0, 0.0)] * 3), pinned))[1] == [3] * 3
    narrow = allocator(costs(per_node=0), widths=(1, 4))
    found = narrow.allocate(slots(1), odds(long[:1], [(0.0, 0.0)]))
    assert (found.width, narrow.widest(1)) == (4, 4)


def test_of_fewer_numbers_of_steps_the_costs_and_trees_go_with_them() -> None:
    table, given = costs(of_round=4), odds([[]], [(0.9, 0.9)])
    assert allocator(table).allocate(slots(1), given).num_steps == STEPS[0]
    assert allocator(table, steps=STEPS[1:]).allocate(slots(1), given).num_steps == STEPS[1]


def test_numbers_of_steps_that_are_left_have_their_own_price() -> None:
    table, given = costs(of_round=40), odds([[]], [(0.9, 0.9)])
    assert of(allocator(table).allocate(slots(1), given))[1] != [0]  # one step needs no round
    assert of(allocator(table, steps=STEPS[1:]).allocate(slots(1), given))[1] == [0]


def test_equal_calls_give_equal_results() -> None:
    random = np.random.default_rng(1)
    made = [allocator(costs()) for _ in range(2)]
    for _ in range(50):
        given = odds(random.random((2, 4)).tolist(), random.random((2, 2)).tolist())
        first, second = (each.allocate(slots(2), given) for each in made)
        assert (of(first), first.width) == (of(second), second.width)
        for each in made:
            each.observe(slots(2), first.num_host + np.int32(1))


def test_other_costs_hold_from_the_next_step_on() -> None:
    made, given = allocator(costs(per_node=9)), odds([[0.3] * 4], [(0.1, 0.1)])
    assert made.allocate(slots(1), given).width == 1
    made.use_costs(costs(per_node=0))
    assert made.allocate(slots(1), given).width > 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"widths": (2, 2)}, "widths must rise"),
        ({"widths": ()}, "widths must rise"),
        ({"num_steps": (0, 1)}, "num_steps must rise"),
        ({"max_nodes": (1,)}, "max_nodes must have one number for each of num_steps"),
        ({"sizes": (1, 7)}, "has no room for a root and 7 nodes"),
        ({"sizes": (1, 4), "base_width": 4}, "has no room for a root and 4 nodes"),
        ({"base_width": 3}, "base_width 3 must be one of widths"),
        ({"widths": (4, 7), "runs_ahead": True}, "runs_ahead needs a width of 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    given = {"widths": WIDTHS, "sizes": SIZES, "num_steps": STEPS, **settings}
    of_drafter = {
        name: given.pop(name) for name in ("sizes", "num_steps", "max_nodes") if name in given
    }
    with pytest.raises(ValueError, match=message):
        StepAllocator(costs(), drafters=[DrafterChoices(**of_drafter)], **given)


@pytest.mark.parametrize("name", ["probs", "model_probs", "model_probs_if_right"])
def test_what_is_no_number_is_refused(name: str) -> None:
    given = odds([SURE], [(0.5, 0.5)])
    getattr(given, name)[0, 0] = np.nan
    with pytest.raises(ValueError, match="probabilit"):
        allocator(costs()).allocate(slots(1), given)
