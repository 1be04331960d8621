"""A table of step costs that is corrected by the times of served steps."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hvd.allocation import DrafterChoices, PredictedDrafts, StepAllocator
from sglang_hvd.costs import LearnedCosts, StepCosts

H200 = Path(__file__).parents[2] / "configs" / "costs" / "llama-3.1-8b-h200.yaml"

BASE = StepCosts(
    about="timed",
    batch_sizes=(1, 8),
    widths=(1, 16),
    verify=((5.0, 8.0), (7.0, 20.0)),
    draft_round=(0.5, 0.9),
    draft_extend=((0.2, 0.3), (0.4, 1.0)),
    draft_once=(0.2, 0.3),
)

Random = np.random.Generator


def verify_ms(costs: StepCosts, num_requests: int, width: int) -> float:
    return float(costs.verify_ms(num_requests, [width])[0])


def extend_ms(costs: StepCosts, num_requests: int, width: int) -> float:
    return float(costs.draft_extend_ms(num_requests, [width])[0])


def draft_ms(costs: StepCosts, num_requests: int, num_steps: int) -> float:
    return float(costs.draft_ms([num_requests], num_steps)[0])


def assert_same(found: StepCosts, wanted: StepCosts) -> None:
    for name in ("verify", "draft_round", "draft_once", "draft_extend"):
        assert np.array(getattr(found, name)) == pytest.approx(np.array(getattr(wanted, name)))
    assert (found.context, found.wait) == (wanted.context, wanted.wait)


def pass_steps(learned: LearnedCosts, num: int) -> None:
    """Steps of a plain kind that take what the base says."""
    for _ in range(num):
        learned.observe_verify(1, 1, verify_ms(BASE, 1, 1))


def test_without_steps_the_table_is_the_base() -> None:
    found = LearnedCosts(BASE).table()
    assert found.about == "timed, refined by its steps"
    assert_same(found, BASE)


def test_each_part_follows_its_own_times() -> None:
    learned = LearnedCosts(BASE)
    for n, width in ((1, 1), (8, 16), (3, 5)) * 400:
        learned.observe_verify(n, width, 1.5 * verify_ms(BASE, n, width))
        learned.observe_extend(n, width, 0.5 * extend_ms(BASE, n, width))
        for steps in (2, 4):
            learned.observe_draft(n, steps, 2.0 * draft_ms(BASE, n, steps))
    found = learned.table()
    for n, width in ((1, 1), (8, 16), (3, 5)):
        assert verify_ms(found, n, width) == pytest.approx(
            1.5 * verify_ms(BASE, n, width), rel=0.02
        )
        assert extend_ms(found, n, width) == pytest.approx(
            0.5 * extend_ms(BASE, n, width), rel=0.02
        )
    assert draft_ms(found, 8, 2) == pytest.approx(2.0 * draft_ms(BASE, 8, 2), rel=0.02)
    assert learned.num_observed == 1200


@pytest.mark.parametrize("num_times", [1, 4, 12])
def test_what_is_more_general_counts_as_four_times(num_times: int) -> None:
    learned = LearnedCosts(BASE)
    for _ in range(num_times):
        learned.observe_verify(1, 1, 10.0)  # twice the base
    share = num_times / (num_times + 4)
    found = learned.table()
    # Another shape has the mean of its part, which is shrunk to the base.
    assert verify_ms(found, 8, 1) == pytest.approx(7.0 * (1 + share))
    assert verify_ms(found, 1, 1) == pytest.approx(5.0 * (1 + share + (1 - share) * share))


def test_a_machine_four_times_slower_than_timed_is_followed() -> None:
    learned = LearnedCosts(BASE)
    for number in range(64):
        n, width = ((1, 1), (8, 1), (8, 16))[number % 3]
        learned.observe_verify(n, width, 4 * verify_ms(BASE, n, width))
    found = learned.table()
    for n, width in ((1, 1), (8, 1), (8, 16), (1, 16)):
        assert verify_ms(found, n, width) == pytest.approx(4 * verify_ms(BASE, n, width), rel=0.1)
    # So are parts that did not run.
    assert draft_ms(found, 8, 4) == pytest.approx(4 * draft_ms(BASE, 8, 4), rel=0.2)
    assert extend_ms(found, 8, 16) == pytest.approx(4 * extend_ms(BASE, 8, 16), rel=0.2)


def test_first_steps_that_wait_for_compilation_leave_the_table_as_it_is() -> None:
    learned = LearnedCosts(BASE)
    for n in range(1, 5):
        learned.observe_verify(n, 16, 9 * verify_ms(BASE, n, 16))
        learned.observe_extend(n, 16, 30.0)
        learned.observe_draft(n, 4, 40.0)
        learned.observe_rest(n, 60.0)
    assert_same(learned.table(), BASE)
    for _ in range(60):
        learned.observe_verify(1, 16, verify_ms(BASE, 1, 16))
        learned.observe_rest(1, 0.5)
    found = learned.table()
    assert verify_ms(found, 1, 16) == pytest.approx(verify_ms(BASE, 1, 16) + 0.5, rel=0.05)
    assert_same(found.model_copy(update={"verify": BASE.verify}), BASE)


def test_a_compilation_after_a_long_time_does_not_count_either() -> None:
    learned = LearnedCosts(BASE)
    for _ in range(300):
        learned.observe_verify(1, 1, 5.0)
        learned.observe_draft(1, 4, 20.0)
    pass_steps(learned, 5000)
    learned.observe_draft(1, 4, 50.0)
    assert draft_ms(learned.table(), 1, 4) == pytest.approx(draft_ms(BASE, 1, 4), rel=0.02)


def test_one_time_far_off_changes_little() -> None:
    learned = LearnedCosts(BASE)
    pass_steps(learned, 100)
    learned.observe_verify(1, 1, 5000.0)
    assert verify_ms(learned.table(), 1, 1) == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("every", [2, 4, 10])
def test_steps_of_a_shape_that_stay_far_off_are_followed(every: int) -> None:
    learned = LearnedCosts(BASE)
    for number in range(2000):
        wide = number % every == 0
        learned.observe_verify(8, 16 if wide else 1, 100.0 if wide else 7.0)
    assert verify_ms(learned.table(), 8, 16) > 90.0


def test_a_draft_that_waits_for_the_host_makes_long_drafts_no_more_expensive() -> None:
    # Seen on an H200: a host launched a draft of one step in 2 ms, of which the GPU needed .2.
    learned = LearnedCosts(BASE)
    for number in range(600):
        n, width = (1, 4, 8)[number % 3], (1, 4, 16)[number // 3 % 3]
        learned.observe_verify(n, width, verify_ms(BASE, n, width))
        learned.observe_extend(n, width, 1.0 + extend_ms(BASE, n, width))
        learned.observe_draft(n, 1, 2.0)
    found = learned.table()
    for n in (1, 4, 8):
        assert draft_ms(found, n, 1) == pytest.approx(2.0, rel=0.05)
        rounds = draft_ms(BASE, n, 4) - draft_ms(BASE, n, 1)
        # Its rounds may be hidden while the host launches them.
        assert 1.95 <= draft_ms(found, n, 4) <= 1.05 * (2.0 + rounds)
        for width in (1, 16):
            wanted = 1.0 + extend_ms(BASE, n, width)
            assert extend_ms(found, n, width) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("slow", [True, False])
def test_a_few_drafts_in_other_steps_tell_a_slow_device_from_one_that_waits(slow: bool) -> None:
    learned = LearnedCosts(BASE)
    in_8, in_1 = draft_ms(BASE, 8, 8), draft_ms(BASE, 8, 1)
    for _ in range(256):
        learned.observe_draft(8, 8, 3 * in_8)
    # What no draft showed may be in proportion: else it would never be tried.
    assert draft_ms(learned.table(), 8, 1) == pytest.approx(3 * in_1, rel=0.1)
    wanted = 3 * in_1 if slow else in_1 + 2 * in_8
    for _ in range(50):
        learned.observe_draft(8, 1, wanted)
    found = learned.table()
    assert draft_ms(found, 8, 8) == pytest.approx(3 * in_8, rel=0.05)
    assert draft_ms(found, 8, 1) == pytest.approx(wanted, rel=0.3)


def test_drafts_of_one_size_and_a_few_others_say_little_of_the_rest() -> None:
    learned, random = LearnedCosts(BASE), np.random.default_rng(5)
    for number in range(8_000):
        learned.observe_verify(8, 1, verify_ms(BASE, 8, 1))
        steps = 7 if number % 400 == 0 else 8
        learned.observe_draft(8, steps, draft_ms(BASE, 8, steps) * random.uniform(0.75, 1.25))
    assert draft_ms(learned.table(), 8, 2) == pytest.approx(draft_ms(BASE, 8, 2), rel=1.0)


def test_a_part_that_the_table_has_for_nothing_may_take_time() -> None:
    free = BASE.model_copy(update={"draft_round": (0.0, 0.0), "draft_once": None})
    learned = LearnedCosts(free)
    for _ in range(300):
        learned.observe_draft(4, 1, 2.0)
    found = learned.table()
    assert draft_ms(found, 4, 1) == pytest.approx(2.0, rel=0.05)
    assert draft_ms(found, 4, 8) == pytest.approx(2.0, rel=0.05)


def test_a_draft_that_is_timed_rarely_is_learned_too() -> None:
    learned = LearnedCosts(BASE)
    for number in range(25 * 256):
        learned.observe_verify(8, 1, verify_ms(BASE, 8, 1))
        if number % 256 == 0:
            learned.observe_draft(8, 4, draft_ms(BASE, 8, 4) / 3)
    assert draft_ms(learned.table(), 8, 4) < 0.5 * draft_ms(BASE, 8, 4)


@pytest.mark.parametrize("per_node", [0.08, -0.05])
def test_nodes_that_take_less_or_more_than_the_table_says_do_so_in_all_shapes(
    per_node: float,
) -> None:
    learned = LearnedCosts(BASE)

    def time(n: int, width: int) -> float:
        return 1.2 * verify_ms(BASE, n, width) + per_node * n * (width - 1)

    for n, width in ((1, 1), (2, 8), (1, 16), (2, 1), (4, 4)) * 300:
        learned.observe_verify(n, width, time(n, width))
    found = learned.table()
    for n, width in ((1, 1), (1, 16), (2, 2), (8, 4), (8, 16)):  # some of them never ran
        assert verify_ms(found, n, width) == pytest.approx(time(n, width), rel=0.1)


@pytest.mark.parametrize("disturbed", [2.0, -0.4])
def test_widths_that_were_disturbed_when_they_were_timed_are_put_right(disturbed: float) -> None:
    widths = (1, 4, 8, 16, 32)
    right = StepCosts(
        about="right",
        batch_sizes=(1, 8),
        widths=widths,
        verify=((5.0, 5.5, 6.0, 6.5, 7.5), (7.0, 8.0, 10.0, 14.0, 24.0)),
        draft_round=(0.5, 0.9),
        draft_extend=((0.2,) * 5, (0.4,) * 5),
    )
    off = np.array([0, 0, disturbed, disturbed, disturbed])
    timed = right.model_copy(update={"verify": (np.array(right.verify) + off).tolist()})
    learned = LearnedCosts(timed)
    for number in range(1200):
        n, width = (1, 2, 8)[number % 3], widths[number // 3 % 5]
        learned.observe_verify(n, width, verify_ms(right, n, width))
    for n in (1, 2, 8):
        found = learned.table().verify_ms(n, widths) - right.verify_ms(n, widths)
        assert np.ptp(found) < 0.4 * abs(disturbed)


def test_a_width_that_never_ran_makes_no_wider_ones_expensive() -> None:
    base = BASE.model_copy(
        update={
            "widths": (1, 4, 8, 16),
            "verify": ((5.0, 6.0, 8.0, 8.0), (7.0, 9.0, 19.0, 20.0)),
            "draft_extend": ((0.2,) * 4, (0.4,) * 4),
        }
    )
    learned = LearnedCosts(base)
    for _ in range(1000):
        for width, milliseconds in ((4, 9.0), (16, 14.0)):
            learned.observe_verify(8, width, milliseconds)
    found = learned.table().verify_ms(8, [4, 8, 16])
    assert found == pytest.approx([9.0, 14.0, 14.0], rel=0.02)


def test_steps_of_one_width_say_nothing_of_others() -> None:
    learned = LearnedCosts(BASE)
    for _ in range(300):
        learned.observe_verify(2, 8, 1.5 * verify_ms(BASE, 2, 8))
    for n, width in ((1, 1), (2, 8), (8, 16)):
        wanted = 1.5 * verify_ms(BASE, n, width)
        assert verify_ms(learned.table(), n, width) == pytest.approx(wanted, rel=0.02)


def test_steps_between_the_entries_of_the_table_are_learned() -> None:
    true = StepCosts.load(H200)
    disturbed = np.array(true.verify) * np.where(np.array(true.widths) >= 4, 1.5, 1.0)
    learned = LearnedCosts(true.model_copy(update={"verify": disturbed.tolist()}))
    for step in range(4000):
        for width in (1, 2, 4 if step % 200 == 0 else 1):
            learned.observe_verify(48, width, verify_ms(true, 48, width))
    found = learned.table().verify_ms(48, [1, 2, 4])
    assert found == pytest.approx(true.verify_ms(48, [1, 2, 4]), rel=0.12)


def test_a_width_that_was_slow_is_forgotten_though_it_ran_no_more() -> None:
    learned = LearnedCosts(BASE)
    for _ in range(400):
        learned.observe_verify(8, 1, 7.0)
        learned.observe_verify(8, 16, 40.0)
    for _ in range(5000):
        learned.observe_verify(8, 1, 7.0)
    assert verify_ms(learned.table(), 8, 16) == pytest.approx(20.0, rel=0.02)
    learned.observe_verify(8, 16, 40.0)  # one time alone does not decide
    assert verify_ms(learned.table(), 8, 16) < 30.0


def test_wide_steps_that_were_slow_once_are_forgotten_by_rare_ones() -> None:
    learned = LearnedCosts(BASE)
    for n, width in ((1, 1), (1, 16)) * 200:
        learned.observe_verify(n, width, verify_ms(BASE, n, width) + 0.2 * (width - 1))
    slow = verify_ms(learned.table(), 1, 16)
    for number in range(3000):
        width = 16 if number % 500 == 499 else 1
        learned.observe_verify(1, width, verify_ms(BASE, 1, width))
    fast, wanted = verify_ms(learned.table(), 1, 16), verify_ms(BASE, 1, 16)
    assert slow > 1.2 * wanted
    assert fast - wanted < 0.5 * (slow - wanted)


def test_what_a_part_took_long_ago_is_forgotten_though_it_ran_no_more() -> None:
    learned = LearnedCosts(BASE)
    for number in range(200):
        steps = (2, 4, 8)[number % 3]
        pass_steps(learned, 1)
        learned.observe_draft(8, steps, 8.0 * draft_ms(BASE, 8, steps))
    wanted = draft_ms(BASE, 8, 4)
    assert draft_ms(learned.table(), 8, 4) == pytest.approx(8.0 * wanted, rel=0.1)
    pass_steps(learned, 5000)
    assert draft_ms(learned.table(), 8, 4) == pytest.approx(wanted, rel=0.2)


@pytest.mark.parametrize(("min_expensive", "chance"), [(4, 0.6), (8, 0.7)])
def test_a_width_that_was_never_tried_is_found(min_expensive: int, chance: float) -> None:
    true = StepCosts.load(H200)
    disturbed = np.array(true.verify) * np.where(np.array(true.widths) >= min_expensive, 1.6, 1.0)
    base = true.model_copy(update={"verify": disturbed.tolist()})
    num, widths = 16, (1, 2, 4, 8, 16, 32)
    slots, length = np.arange(num, dtype=np.int32), 31
    odds = PredictedDrafts(
        np.tile(np.cumprod(np.full(length, chance)), (num, 1)).astype(np.float32),
        np.tile(np.arange(1, length + 1, dtype=np.int32), (num, 1)),
        np.full(num, length, np.int32),
        *(np.full((num, 1, 2), 1e-3, np.float32) for _ in range(2)),
    )

    def widths_chosen(costs: StepCosts, num_steps: int) -> list[int]:
        allocator = StepAllocator(costs, widths=widths, drafters=[DrafterChoices((3,), (2,))])
        learned = LearnedCosts(costs)
        for slot in slots:
            allocator.start(slot)
        found = []
        for number in range(num_steps):
            chosen = allocator.allocate(slots, odds)
            found.append(chosen.width)
            right = odds.probs[0, : chosen.width - 1].sum()
            allocator.observe(slots, np.full(num, 1 + round(float(right)), np.int32))
            learned.observe_verify(num, chosen.width, verify_ms(true, num, chosen.width))
            if number % 64 == 0:
                allocator.use_costs(learned.table())
        return found

    best = max(set(right := widths_chosen(true, 256)), key=right.count)
    assert verify_ms(base, num, best) > 1.5 * verify_ms(true, num, best)
    assert best not in widths_chosen(base, 256)
    latest = widths_chosen(base, 12_000)[-512:]
    assert latest.count(best) > 0.9 * len(latest)


@pytest.mark.parametrize(
    ("true_ms", "usual"),
    [
        (lambda of_table: max(of_table, 2.0), 3),  # a host takes as long for any draft
        (lambda of_table: 20.0 * of_table, 0),  # the device does, and rounds do not pay
        (lambda of_table: of_table, 3),
    ],
)
def test_what_is_decided_by_the_times_does_not_keep_them_from_being_right(
    true_ms: Callable[[float], float], usual: int
) -> None:
    base = StepCosts.load(H200)
    sizes, steps, widths = (3, 7, 15), (1, 2, 3), (1, 4, 8, 16, 32)
    allocator = StepAllocator(base, widths=widths, drafters=[DrafterChoices(sizes, steps)])
    learned, random = LearnedCosts(base), np.random.default_rng(1)
    for slot in range(32):
        allocator.start(slot)
    found = []
    for number in range(1, 2000):
        n = (2, 8, 32)[number % 3]
        slots = np.arange(n, dtype=np.int32)
        # At first a draft of more than one step rarely pays.
        chances = random.uniform(*((0.2, 0.5) if number < 400 else (0.6, 0.9)), n)
        reaches = np.cumprod(np.broadcast_to(chances[:, None, None], (n, 3, 3)), axis=2)
        reaches = np.ascontiguousarray(reaches, np.float32)
        nothing = np.zeros((n, 1), np.float32)
        chosen = allocator.allocate(
            slots,
            PredictedDrafts(
                nothing, nothing.astype(np.int32), np.zeros(n, np.int32), reaches, reaches
            ),
        )
        drafting = int((chosen.num_model > 0).sum())
        found.append(chosen.num_steps if drafting else 0)
        right = (random.random((n, chosen.num_steps)) < chances[:, None]).cumprod(1).sum(1)
        allocator.observe(slots, (1 + right * (chosen.num_model > 0)).astype(np.int32))
        learned.observe_verify(n, chosen.width, verify_ms(base, n, chosen.width))
        learned.observe_extend(n, chosen.width, extend_ms(base, n, chosen.width))
        if drafting:
            # Some time goes to each request, whatever the steps.
            milliseconds = true_ms(draft_ms(base, drafting, chosen.num_steps)) + 0.05 * drafting
            learned.observe_draft(drafting, chosen.num_steps, milliseconds)
        if number % 64 == 0 or number in (2, 4, 8, 16, 32):
            allocator.use_costs(learned.table())
    latest = found[-400:]
    assert latest.count(usual) > 0.9 * len(latest)


# Compared with BASE its nodes take little.
EVEN = BASE.model_copy(update={"verify": ((5.0, 8.0), (7.0, 9.4))})


def steps_of(contexts: list[int], num: int) -> list[tuple[int, int, int]]:
    """Requests, width and tokens of context of so many steps. All requests of a step have the same
    context, which changes every 40 steps."""
    shapes = ((1, 1), (8, 1), (3, 5), (8, 16))
    return [
        (n, width, n * contexts[number // 40 % len(contexts)])
        for number in range(num)
        for n, width in [shapes[number % len(shapes)]]
    ]


def test_the_price_of_contexts_is_known_apart_from_the_rest() -> None:
    learned, random = LearnedCosts(BASE), np.random.default_rng(3)
    for n, width, num_context in steps_of([200, 4000], 1200):
        exact = 1.2 * verify_ms(BASE, n, width) + 0.0004 * num_context
        noise = 1 + 0.05 * random.standard_normal()
        learned.observe_verify(n, width, noise * exact, num_context=num_context)
    found = learned.table()
    assert found.context == pytest.approx(0.4, rel=0.1)
    for n, width in ((1, 1), (8, 1), (8, 16)):
        assert verify_ms(found, n, width) == pytest.approx(1.2 * verify_ms(BASE, n, width), rel=0.1)


@pytest.mark.parametrize("timed", [None, 0.3])
def test_from_documents_to_chats_the_price_changes_at_once(timed: float | None) -> None:
    learned = LearnedCosts(BASE.model_copy(update={"context": timed}))
    for n, width, num_context in steps_of([1500, 4000], 1200):
        taken = verify_ms(BASE, n, width) + 0.0005 * num_context
        learned.observe_verify(n, width, taken, num_context=num_context)
    found = learned.table()
    for n in (1, 8):
        chat = verify_ms(found, n, 1) + found.context_ms(50 * n)
        assert chat == pytest.approx(verify_ms(BASE, n, 1) + 0.025 * n, rel=0.1)


def test_a_timed_price_of_contexts_holds_where_contexts_do_not_differ() -> None:
    learned = LearnedCosts(BASE.model_copy(update={"context": 0.5}))
    for n, width, num_context in steps_of([2000], 400):
        taken = 1.5 * verify_ms(BASE, n, width) + 0.0005 * num_context
        learned.observe_verify(n, width, taken, num_context=num_context)
    found = learned.table()
    assert found.context == pytest.approx(0.5)
    assert verify_ms(found, 8, 1) == pytest.approx(1.5 * verify_ms(BASE, 8, 1), rel=0.02)


@pytest.mark.parametrize("share_of_others", [0.0, 0.1])
def test_contexts_do_not_take_what_the_nodes_of_wide_steps_take(share_of_others: float) -> None:
    """Chats are decoded plainly and documents verify wide drafts, except for rare tries."""
    learned, random = LearnedCosts(EVEN), np.random.default_rng(0)
    for step in range(1500):
        is_document = step // 200 % 2 == 1
        is_wide = is_document
        if step % 256 == 255 or random.random() < share_of_others:
            is_wide = not is_document
        width = 16 if is_wide else 1
        taken = (7 + 0.05 * 8 * (width - 1)) * (1 + 0.05 * random.standard_normal())
        learned.observe_verify(8, width, taken, num_context=8 * (4000 if is_document else 200))
    narrow, wide = learned.table().verify_ms(8, [1, 16])
    assert wide - narrow == pytest.approx(6.0, rel=0.1 if share_of_others else 0.35)


def test_contexts_do_not_take_what_more_requests_take() -> None:
    learned, random = LearnedCosts(EVEN), np.random.default_rng(1)
    for step in range(1500):  # the table has 5 and 7 ms
        n, exact = ((1, 6.0), (8, 14.0))[step % 2]
        num_context = n * int(random.integers(300, 700))
        taken = exact * (1 + 0.05 * random.standard_normal())
        learned.observe_verify(n, 1, taken, num_context=num_context)
    found = learned.table()
    assert verify_ms(found, 1, 1) + found.context_ms(30_000) == pytest.approx(6, rel=0.15)
    assert verify_ms(found, 8, 1) + found.context_ms(400) == pytest.approx(14, rel=0.05)


def test_a_machine_that_slows_down_while_contexts_grow_a_little_is_slower() -> None:
    learned = LearnedCosts(BASE)
    for number in range(500):
        taken = 7.0 * (1 + number / 1000)
        learned.observe_verify(8, 1, taken, num_context=8 * (2000 + number // 10))
    assert verify_ms(learned.table(), 8, 1) > 0.5 * 7.0


def test_longer_contexts_that_take_less_take_nothing() -> None:
    learned = LearnedCosts(BASE)
    for n, width, num_context in steps_of([200, 4000], 400):
        taken = verify_ms(BASE, n, width) * (1.5 if num_context < 2000 else 0.9)
        learned.observe_verify(n, width, taken, num_context=num_context)
    assert learned.table().context is None


def test_where_contexts_take_all_the_nodes_keep_some() -> None:
    learned = LearnedCosts(BASE)
    for number, (n, width, num_context) in enumerate(steps_of([100, 8000], 2400)):
        learned.observe_verify(n, width, 0.001 * num_context, num_context=num_context)
        if number % 64 == 0:  # what is far off depends on the price so far
            learned.table()
    found = learned.table()
    assert verify_ms(found, 1, 1) > 0.05 * 5.0
    assert verify_ms(found, 8, 1) + found.context_ms(64_000) == pytest.approx(64, rel=0.1)


def test_widths_that_never_ran_keep_their_price_where_contexts_take_half() -> None:
    batch_sizes, columns = (1, 4, 16, 64), (1, 2, 4, 8, 16, 32)
    right = StepCosts(
        about="right",
        batch_sizes=batch_sizes,
        widths=columns,
        verify=tuple(tuple(2 + 0.02 * n + 0.01 * n * w for w in columns) for n in batch_sizes),
        draft_round=(0.5,) * 4,
        draft_extend=((0.2,) * 6,) * 4,
    )
    learned, random = LearnedCosts(right), np.random.default_rng(4)
    for number in range(400):
        width, num_context = (2, 8)[number % 2], 16 * int(random.integers(60, 1900))
        exact = verify_ms(right, 16, width) + 3e-4 * num_context
        taken = exact * (1 + 0.02 * random.standard_normal())
        learned.observe_verify(16, width, taken, num_context=num_context)
        if number % 64 == 0:
            learned.table()
    for n in (16, 64):
        found = learned.table().verify_ms(n, columns)
        assert found == pytest.approx(right.verify_ms(n, columns), rel=0.15)


def test_the_rest_of_a_step_is_added_to_every_width() -> None:
    learned = LearnedCosts(BASE)
    for n in (1, 8) * 50:
        learned.observe_rest(n, 2.0 + 0.5 * n)
    found = learned.table()
    assert found.verify_ms(1, [1, 16]) == pytest.approx([7.5, 10.5], rel=0.02)
    assert verify_ms(found, 8, 16) == pytest.approx(26.0, rel=0.02)
    assert found.wait is None


@pytest.mark.parametrize(("num_pauses", "num_steps"), [(4, 64), (8, 128), (15, 300)])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_pauses_in_the_first_steps_change_little(
    num_pauses: int, num_steps: int, num_requests: int
) -> None:
    learned = LearnedCosts(BASE)
    for milliseconds in [50.0] * num_pauses + [0.5] * (num_steps - num_pauses) + [60.0] * 5:
        learned.observe_verify(num_requests, 1, verify_ms(BASE, num_requests, 1))
        learned.observe_rest(num_requests, milliseconds)
    rest = verify_ms(learned.table(), num_requests, 1) - verify_ms(BASE, num_requests, 1)
    assert rest < 2.0


def test_the_wait_of_steps_is_apart_from_the_rest_of_all_steps() -> None:
    learned = LearnedCosts(BASE, runs_ahead=True)
    for step in range(1600):
        n = 1 + step % 8
        learned.observe_verify(n, 1, verify_ms(BASE, n, 1))
        learned.observe_rest(n, 0.25, is_before_ahead=True)
        if step % 4 == step // 8 % 4:
            learned.observe_rest(n, 2.25 + 0.125 * n)
    found = learned.table()
    for n in (1, 8):
        assert found.wait_ms(n) == pytest.approx(2 + 0.125 * n, abs=0.05)
        assert verify_ms(found, n, 1) - verify_ms(BASE, n, 1) == pytest.approx(0.25, abs=0.05)


def test_until_a_step_was_launched_ahead_all_of_the_rest_is_wait() -> None:
    learned = LearnedCosts(BASE, runs_ahead=True)
    for _ in range(50):
        learned.observe_rest(4, 3.0)
    found = learned.table()
    for n in (1, 4, 8):  # a number of requests that never ran has the same
        assert found.wait_ms(n) == pytest.approx(3, abs=0.1)
    assert found.verify == BASE.verify


def test_a_wait_does_not_seem_free_for_steps_of_long_ago() -> None:
    # A busy host, of which some steps were launched ahead, then an idle one, of which none was.
    learned = LearnedCosts(BASE, runs_ahead=True)

    def rest(milliseconds: float, *, is_before_ahead: bool) -> None:
        learned.observe_verify(8, 1, 7.0)
        learned.observe_rest(8, milliseconds, is_before_ahead=is_before_ahead)

    for _ in range(100):
        rest(6.0, is_before_ahead=True)
        rest(9.0, is_before_ahead=False)
    assert learned.table().wait_ms(8) == pytest.approx(3.0, rel=0.05)
    for _ in range(1000):
        rest(3.0, is_before_ahead=False)
    assert learned.table().wait_ms(8) > 2.0
    for _ in range(200):
        rest(0.5, is_before_ahead=True)
        rest(3.0, is_before_ahead=False)
    assert learned.table().wait_ms(8) == pytest.approx(2.5, rel=0.3)


def test_a_wait_of_the_table_holds_until_one_is_learned() -> None:
    learned = LearnedCosts(BASE.model_copy(update={"wait": (2.0, 3.0)}), runs_ahead=True)
    learned.observe_verify(8, 1, 7.0)
    assert learned.table().wait == (2.0, 3.0)
    for _ in range(50):
        learned.observe_rest(4, 5.0)
    assert learned.table().wait_ms(4) == pytest.approx(5.0, abs=0.1)


def test_a_wait_that_is_shorter_than_the_rest_of_all_steps_is_none() -> None:
    learned = LearnedCosts(BASE, runs_ahead=True)
    for _ in range(50):
        learned.observe_rest(4, 1.0, is_before_ahead=True)
        learned.observe_rest(4, 0.5)
    assert learned.table().wait is None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 16), st.floats(0, 200), st.integers(0, 10**6)),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_steps_take_the_table_is_one(steps: list[tuple[int, int, float, int]]) -> None:
    learned = LearnedCosts(BASE)
    for n, width, milliseconds, num_context in steps:
        learned.observe_verify(n, width, milliseconds, num_context=num_context)
        learned.observe_extend(n, width, milliseconds / 3)
        learned.observe_draft(n, width, milliseconds / 2)
        learned.observe_rest(n, milliseconds / 7)
        learned.table()  # StepCosts refuses times that fall
