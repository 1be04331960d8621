"""A table that was timed beforehand, kept right by the steps that are served."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hvd.allocation import CostFit, CostScale, DrafterChoices, PredictedDrafts, StepAllocator
from sglang_hvd.costs import StepCosts

CONFIGS = Path(__file__).parents[2] / "configs"

BASE = StepCosts(
    about="timed",
    batch_sizes=(1, 8),
    widths=(1, 16),
    verify=((5.0, 8.0), (7.0, 20.0)),
    draft_round=(0.5, 0.9),
    draft_extend=((0.2, 0.3), (0.4, 1.0)),
)


def test_without_steps_the_table_is_what_was_timed() -> None:
    scale = CostScale(BASE)
    table = scale.table(scale.coefficients())
    assert (table.verify, table.draft_round, table.draft_extend) == (
        BASE.verify,
        BASE.draft_round,
        BASE.draft_extend,
    )
    assert table.about == "timed, refined by its steps"


def test_each_part_follows_its_own_times_and_keeps_its_shape() -> None:
    scale = CostScale(BASE)
    for n, width in ((1, 1), (8, 16), (3, 5)) * 400:
        scale.observe_verify(n, width, 1.5 * float(BASE.verify_ms(n, [width])[0]))
        scale.observe_extend(n, width, 0.5 * float(BASE.draft_extend_ms(n, [width])[0]))
        for steps in (2, 4):
            scale.observe_draft(n, steps, 2.0 * float(BASE.draft_ms([n], steps)[0]))
    table = scale.table(scale.coefficients())
    assert table.verify_ms(8, [16])[0] == pytest.approx(30.0, rel=0.02)
    assert table.verify_ms(1, [1])[0] == pytest.approx(7.5, rel=0.02)
    assert table.draft_extend_ms(8, [16])[0] == pytest.approx(0.5, rel=0.02)
    assert table.draft_ms([8], 2)[0] == pytest.approx(1.8, rel=0.02)
    assert scale.num_observed == 1200


def test_a_part_that_never_ran_is_as_far_off_as_the_verifications() -> None:
    scale = CostScale(BASE)
    for _ in range(200):
        scale.observe_verify(1, 1, 2.5)  # the table was timed on a busy machine
    table = scale.table(scale.coefficients())
    assert table.draft_round == pytest.approx((0.25, 0.45), rel=0.03)
    for _ in range(50):
        scale.observe_draft(1, 4, 3.0)
    assert scale.table(scale.coefficients()).draft_ms([1], 4)[0] == pytest.approx(3.0, rel=0.1)


def ratio_of_verifications(scale: CostScale) -> float:
    """A part that never ran has it."""
    return scale.table(scale.coefficients()).draft_round[0] / BASE.draft_round[0]


@pytest.mark.parametrize("num_times", [1, 4, 12])
def test_what_was_timed_beforehand_counts_as_four_times(num_times: int) -> None:
    scale = CostScale(BASE)
    for _ in range(num_times):
        scale.observe_verify(1, 1, 10.0)  # twice the table's
    wanted = (2 * num_times + 4) / (num_times + 4)
    assert ratio_of_verifications(scale) == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize(
    ("num_times", "measured", "wanted"),
    [(4, 3.0, 2.25), (12, 3.0, 2.625), (4, 0.75, 1.125), (12, 0.75, 0.9375)],
)
def test_what_was_timed_of_a_part_counts_as_four_times_too(
    num_times: int, measured: float, wanted: float
) -> None:
    scale = CostScale(BASE)
    for _ in range(num_times):
        scale.observe_draft(1, 4, measured)  # 1.5 by the table
    assert scale.table(scale.coefficients()).draft_ms([1], 4)[0] == pytest.approx(wanted)


def test_a_machine_far_slower_than_it_was_timed_is_followed() -> None:
    scale = CostScale(BASE)
    for _ in range(3000):
        scale.observe_verify(1, 1, 20.0)
    assert ratio_of_verifications(scale) == pytest.approx(4.0, rel=0.02)
    for _ in range(40):
        scale.observe_verify(1, 1, 50.0)  # no outliers, by what steps take now
    assert ratio_of_verifications(scale) == pytest.approx(4.5, rel=0.02)


@pytest.mark.parametrize("numbers_of_steps", [(4,), (2, 4, 8)])
def test_what_a_part_took_long_ago_is_forgotten_though_it_ran_no_more(
    numbers_of_steps: tuple[int, ...],
) -> None:
    scale = CostScale(BASE)
    for number in range(200):
        steps = numbers_of_steps[number % len(numbers_of_steps)]
        scale.observe_verify(1, 1, 5.0)
        scale.observe_draft(8, steps, 8.0 * float(BASE.draft_ms([8], steps)[0]))
    dear = scale.table(scale.coefficients()).draft_ms([8], 4)[0]
    assert dear == pytest.approx(8.0 * BASE.draft_ms([8], 4)[0], rel=0.1)
    for _ in range(5000):
        scale.observe_verify(1, 1, 5.0)
    now = scale.table(scale.coefficients()).draft_ms([8], 4)[0]
    assert now == pytest.approx(BASE.draft_ms([8], 4)[0], rel=0.2)


def test_what_a_draft_takes_beside_its_rounds_follows_with_them() -> None:
    base = BASE.model_copy(update={"draft_once": (0.3, 0.6)})
    scale = CostScale(base)
    for steps in (1, 4) * 200:
        scale.observe_draft(8, steps, 2.0 * float(base.draft_ms([8], steps)[0]))
    table = scale.table(scale.coefficients())
    assert table.draft_ms([8], 1)[0] == pytest.approx(1.2, rel=0.02)
    assert table.draft_ms([8], 2)[0] == pytest.approx(3.0, rel=0.02)


def test_what_a_step_takes_beside_its_parts_is_added_to_every_width() -> None:
    scale = CostScale(BASE)
    for n in (1, 8) * 50:
        scale.observe_rest(n, 2.0 + 0.5 * n)
    table = scale.table(scale.coefficients())
    assert table.verify_ms(1, [1, 16]) == pytest.approx([7.5, 10.5], rel=0.02)
    assert table.verify_ms(8, [16])[0] == pytest.approx(26.0, rel=0.02)


@pytest.mark.parametrize("per_node", [0.08, -0.05])
def test_wide_steps_may_be_further_off_than_narrow_ones(per_node: float) -> None:
    scale = CostScale(BASE)

    def time(n: int, width: int) -> float:
        return 1.2 * float(BASE.verify_ms(n, [width])[0]) + per_node * n * (width - 1)

    for n, width in ((1, 1), (2, 8), (1, 16), (2, 1), (4, 4)) * 300:
        scale.observe_verify(n, width, time(n, width))
    table = scale.table(scale.coefficients())
    for n, width in ((1, 1), (1, 16), (2, 2), (8, 4), (8, 16)):  # some were never seen
        assert table.verify_ms(n, [width])[0] == pytest.approx(time(n, width), rel=0.07)


@pytest.mark.parametrize("per_request", [0.5, -0.2])
def test_what_requests_take_more_is_not_put_to_their_nodes(per_request: float) -> None:
    scale = CostScale(BASE)

    def time(n: int, width: int) -> float:
        return float(BASE.verify_ms(n, [width])[0]) + per_request * n

    # Few requests verify widely, many narrowly.
    for n, width in ((1, 8), (8, 1), (1, 16), (8, 2), (4, 4)) * 300:
        scale.observe_verify(n, width, time(n, width))
    table = scale.table(scale.coefficients())
    for n in (1, 4, 8):
        narrow, wide = table.verify_ms(n, [1, 16])
        wanted = np.diff(BASE.verify_ms(n, [1, 16]))[0]
        assert wide - narrow == pytest.approx(wanted, rel=0.2)


def test_wide_steps_that_were_slow_once_are_forgotten() -> None:
    scale = CostScale(BASE)
    for n, width in ((1, 1), (1, 16)) * 200:
        scale.observe_verify(n, width, float(BASE.verify_ms(n, [width])[0]) + 0.2 * (width - 1))
    slow = scale.table(scale.coefficients()).verify_ms(1, [16])[0]
    for number in range(3000):
        width = 16 if number % 500 == 499 else 1
        scale.observe_verify(1, width, float(BASE.verify_ms(1, [width])[0]))
    fast = scale.table(scale.coefficients()).verify_ms(1, [16])[0]
    wanted = float(BASE.verify_ms(1, [16])[0])
    assert slow > 1.2 * wanted
    assert fast - wanted < 0.5 * (slow - wanted)


def test_nodes_change_no_step_by_more_than_half() -> None:
    scale = CostScale(BASE)
    for step in range(2000):
        width = 16 if step % 200 == 0 else 1
        factor = 3 if width > 1 else 1
        scale.observe_verify(1, width, factor * float(BASE.verify_ms(1, [width])[0]))
    table = scale.table(scale.coefficients())
    assert table.verify_ms(1, [16])[0] < 1.6 * float(BASE.verify_ms(1, [16])[0])


@pytest.mark.parametrize("disturbed", [2.0, -0.4])
def test_a_width_that_was_disturbed_when_it_was_timed_is_put_right(disturbed: float) -> None:
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
    timed = right.model_copy(update={"verify": tuple(map(tuple, np.array(right.verify) + off))})
    scale = CostScale(timed)
    for number in range(1200):
        n, width = (1, 2, 8)[number % 3], widths[number // 3 % 5]
        scale.observe_verify(n, width, float(right.verify_ms(n, [width])[0]))
    table = scale.table(scale.coefficients())
    for n in (1, 2, 8):
        found = table.verify_ms(n, widths) - right.verify_ms(n, widths)
        assert np.ptp(found) < 0.4 * abs(disturbed)


def test_steps_of_one_width_tell_nothing_of_others() -> None:
    scale = CostScale(BASE)
    for _ in range(300):
        scale.observe_verify(2, 8, 1.5 * float(BASE.verify_ms(2, [8])[0]))
    table = scale.table(scale.coefficients())
    for n, width in ((1, 1), (2, 8), (8, 16)):
        wanted = 1.5 * float(BASE.verify_ms(n, [width])[0])
        assert table.verify_ms(n, [width])[0] == pytest.approx(wanted, rel=0.02)


WITH_ONCE = BASE.model_copy(update={"draft_once": (0.2, 0.3)})


def test_a_gpu_that_waits_for_the_host_makes_long_drafts_no_dearer() -> None:
    # Seen on an H200: a host launched a draft in one step in 2 ms, of which the GPU needed .2.
    scale = CostScale(WITH_ONCE)
    for number in range(600):
        n, width = (1, 4, 8)[number % 3], (1, 4, 16)[number // 3 % 3]
        scale.observe_verify(n, width, float(WITH_ONCE.verify_ms(n, [width])[0]))
        scale.observe_extend(n, width, 1.0 + float(WITH_ONCE.draft_extend_ms(n, [width])[0]))
        scale.observe_draft(n, 1, 2.0)
    table = scale.table(scale.coefficients())
    for n in (1, 4, 8):
        rounds = 3 * float(np.interp(n, BASE.batch_sizes, BASE.draft_round))
        assert table.draft_ms([n], 1)[0] == pytest.approx(2.0, rel=0.05)
        # Its rounds may well be hidden behind the host, too.
        assert 1.95 <= table.draft_ms([n], 4)[0] <= 1.05 * (2.0 + rounds)
        for width in (1, 16):
            wanted = 1.0 + float(WITH_ONCE.draft_extend_ms(n, [width])[0])
            assert table.draft_extend_ms(n, [width])[0] == pytest.approx(wanted, rel=0.02)


def test_one_draft_in_other_steps_tells_a_slow_device_from_one_that_waits() -> None:
    slow, waits = CostScale(WITH_ONCE), CostScale(WITH_ONCE)
    in_8, in_1 = (float(WITH_ONCE.draft_ms([8], steps)[0]) for steps in (8, 1))
    for scale, of_one in ((slow, 3 * in_1), (waits, in_1 + 2 * in_8)):
        for _ in range(256):
            scale.observe_draft(8, 8, 3 * in_8)
        # Without it, what is missing does not depend on the steps.
        assert scale.table(scale.coefficients()).draft_ms([8], 1)[0] > 2 * in_8
        scale.observe_draft(8, 1, of_one)
        table = scale.table(scale.coefficients())
        assert table.draft_ms([8], 8)[0] == pytest.approx(3 * in_8, rel=0.05)
        assert table.draft_ms([8], 1)[0] == pytest.approx(of_one, rel=0.3, abs=0.2 * in_8)


@pytest.mark.parametrize(
    ("draft_ms", "usual"),
    [
        (lambda of_table: max(of_table, 2.0), 3),  # a host takes as long for any draft
        (lambda of_table: 20.0 * of_table, 0),  # the device does, and rounds do not pay
        (lambda of_table: of_table, 3),
    ],
)
def test_what_is_decided_by_the_times_does_not_keep_them_from_being_right(
    draft_ms: Callable[[float], float], usual: int
) -> None:
    base = StepCosts.load(CONFIGS / "costs" / "llama-3.1-8b-h200.yaml")
    sizes, steps, widths = (3, 7, 15), (1, 2, 3), (1, 4, 8, 16, 32)
    allocator = StepAllocator(base, widths=widths, drafters=[DrafterChoices(sizes, steps)])
    scale, random = CostScale(base), np.random.default_rng(1)
    for slot in range(32):
        allocator.start(slot)
    found = []
    for number in range(1, 2000):
        n = (2, 8, 32)[number % 3]
        slots = np.arange(n, dtype=np.int32)
        # At first hardly a draft in more than one step pays.
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
        scale.observe_verify(n, chosen.width, float(base.verify_ms(n, [chosen.width])[0]))
        scale.observe_extend(n, chosen.width, float(base.draft_extend_ms(n, [chosen.width])[0]))
        if drafting:
            of_table = float(base.draft_ms([drafting], chosen.num_steps)[0])
            # Some time goes to each request, whatever the steps.
            milliseconds = draft_ms(of_table) + 0.05 * drafting
            scale.observe_draft(drafting, chosen.num_steps, milliseconds)
        if number % 64 == 0 or number in (2, 4, 8, 16, 32):
            allocator.use_costs(scale.table(scale.coefficients()))
    latest = found[-400:]
    assert latest.count(usual) > 0.9 * len(latest)


def test_a_width_that_was_slow_is_forgotten_though_it_ran_no_more() -> None:
    base = BASE.model_copy(
        update={
            "widths": (1, 8, 16),
            "verify": ((5.0, 6.0, 8.0), (7.0, 10.0, 20.0)),
            "draft_extend": ((0.2,) * 3, (0.4,) * 3),
        }
    )
    scale = CostScale(base)
    for step in range(6000):
        scale.observe_verify(8, 1, 7.0)
        if step < 400:
            scale.observe_verify(8, 8, 14.0)
    fresh = scale.table(scale.coefficients()).verify_ms(8, [8])[0]
    assert fresh == pytest.approx(10.0, rel=0.02)
    # As if it was never timed: a single time does not decide.
    scale.observe_verify(8, 8, 14.0)
    assert scale.table(scale.coefficients()).verify_ms(8, [8])[0] < 12.0


def test_steps_between_the_entries_of_the_table_are_learned() -> None:
    true = StepCosts.load(CONFIGS / "costs" / "llama-3.1-8b-h200.yaml")
    disturbed = np.array(true.verify) * np.where(np.array(true.widths) >= 4, 1.5, 1.0)
    scale = CostScale(true.model_copy(update={"verify": disturbed.tolist()}))
    for step in range(4000):
        for width in (1, 2, 4 if step % 200 == 0 else 1):
            scale.observe_verify(48, width, float(true.verify_ms(48, [width])[0]))
    learned = scale.table(scale.coefficients()).verify_ms(48, [1, 2, 4])
    assert learned == pytest.approx(true.verify_ms(48, [1, 2, 4]), rel=0.12)


def test_drafts_of_one_size_and_a_few_others_say_little_of_the_ratio() -> None:
    scale, random = CostScale(WITH_ONCE), np.random.default_rng(5)
    for number in range(20_000):
        scale.observe_verify(8, 1, float(WITH_ONCE.verify_ms(8, [1])[0]))
        steps = 7 if number % 400 == 0 else 8
        of_table = float(WITH_ONCE.draft_ms([8], steps)[0])
        scale.observe_draft(8, steps, of_table * random.uniform(0.75, 1.25))
    learned = scale.table(scale.coefficients()).draft_ms([8], 2)[0]
    assert learned == pytest.approx(WITH_ONCE.draft_ms([8], 2)[0], rel=1.0)


@pytest.mark.parametrize(("least_dear", "chance"), [(4, 0.6), (8, 0.7)])
def test_widths_that_seem_too_dear_are_found_to_be_what_they_are(
    least_dear: int, chance: float
) -> None:
    true = StepCosts.load(CONFIGS / "costs" / "llama-3.1-8b-h200.yaml")
    disturbed = np.array(true.verify) * np.where(np.array(true.widths) >= least_dear, 1.6, 1.0)
    base = true.model_copy(update={"verify": disturbed.tolist()})
    num, widths = 16, (1, 2, 4, 8, 16, 32)
    slots, length = np.arange(num, dtype=np.int32), 31
    given = PredictedDrafts(
        np.tile(np.cumprod(np.full(length, chance)), (num, 1)).astype(np.float32),
        np.tile(np.arange(1, length + 1, dtype=np.int32), (num, 1)),
        np.full(num, length, np.int32),
        *(np.full((num, 1, 2), 1e-3, np.float32) for _ in range(2)),
    )

    def widths_chosen(table: StepCosts, num_steps: int) -> list[int]:
        allocator = StepAllocator(table, widths=widths, drafters=[DrafterChoices((3,), (2,))])
        scale = CostScale(table)
        for slot in slots:
            allocator.start(slot)
        found = []
        for number in range(num_steps):
            chosen = allocator.allocate(slots, given)
            found.append(chosen.width)
            right = given.probs[0, : chosen.width - 1].sum()
            allocator.observe(slots, np.full(num, 1 + round(float(right)), np.int32))
            scale.observe_verify(num, chosen.width, float(true.verify_ms(num, [chosen.width])[0]))
            if number % 64 == 0:
                allocator.use_costs(scale.table(scale.coefficients()))
        return found

    best = max(set(right := widths_chosen(true, 256)), key=right.count)
    assert base.verify_ms(num, [best])[0] > 1.5 * true.verify_ms(num, [best])[0]
    assert best not in widths_chosen(base, 256)
    latest = widths_chosen(base, 12_000)[-512:]
    assert latest.count(best) > 0.9 * len(latest)


def test_a_width_that_no_step_had_makes_no_wider_ones_dear() -> None:
    base = BASE.model_copy(
        update={
            "widths": (1, 4, 8, 16),
            "verify": ((5.0, 6.0, 8.0, 8.0), (7.0, 9.0, 19.0, 20.0)),
            "draft_extend": ((0.2,) * 4, (0.4,) * 4),
        }
    )
    scale = CostScale(base)
    for _ in range(1000):
        for width, milliseconds in ((4, 9.0), (16, 14.0)):
            scale.observe_verify(8, width, milliseconds)
    table = scale.table(scale.coefficients())
    assert table.verify_ms(8, [4, 8, 16]) == pytest.approx([9.0, 14.0, 14.0], rel=0.02)


def test_a_draft_that_is_timed_now_and_then_only_is_learned_too() -> None:
    scale = CostScale(WITH_ONCE)
    for number in range(25 * 256):
        scale.observe_verify(8, 1, float(WITH_ONCE.verify_ms(8, [1])[0]))
        if number % 256 == 0:
            scale.observe_draft(8, 4, float(WITH_ONCE.draft_ms([8], 4)[0]) / 3)
    learned = scale.table(scale.coefficients()).draft_ms([8], 4)[0]
    assert learned < 0.5 * WITH_ONCE.draft_ms([8], 4)[0]


def test_a_wait_of_the_table_holds_until_one_is_learned() -> None:
    base = BASE.model_copy(update={"wait": (2.0, 3.0)})
    scale = CostScale(base, runs_ahead=True)
    scale.observe_verify(8, 1, 7.0)
    assert scale.table(scale.coefficients()).wait == (2.0, 3.0)
    for _ in range(50):
        scale.observe_rest(4, 5.0)
    assert scale.table(scale.coefficients()).wait_ms(4) == pytest.approx(5.0, abs=0.1)


def test_contexts_that_depend_on_the_batch_say_nothing_of_nodes() -> None:
    scale, random = CostScale(BASE), np.random.default_rng(1)
    for number in range(800):  # one request has a long context, eight have short ones
        n = 1 if number // 20 % 2 else 8
        num_context = round(12_000 * random.uniform(0.5, 1.5)) if n == 1 else 0
        more = num_context / 1000
        width = (4, 16)[number % 2]
        taken = more + float(BASE.verify_ms(n, [width])[0])
        scale.observe_verify(n, width, taken, num_context=num_context)
        scale.observe_extend(n, width, more / 10 + float(BASE.draft_extend_ms(n, [width])[0]))
        steps = (4, 2)[number % 2]
        scale.observe_draft(n, steps, more / 10 + float(BASE.draft_ms([n], steps)[0]))
    table = scale.table(scale.coefficients())
    for times, of_table in (
        (table.verify_ms(8, [1, 16]), BASE.verify_ms(8, [1, 16])),
        (table.draft_extend_ms(8, [1, 16]), BASE.draft_extend_ms(8, [1, 16])),
    ):
        assert np.diff(times)[0] == pytest.approx(np.diff(of_table)[0], rel=0.3)
    rounds = 4 * float(BASE.draft_round[1])
    assert table.draft_ms([8], 8)[0] - table.draft_ms([8], 4)[0] == pytest.approx(rounds, rel=0.2)


def test_a_large_batch_does_not_keep_small_ones_from_being_learned() -> None:
    scale = CostScale(BASE)
    scale.observe_verify(64, 32, float(BASE.verify_ms(64, [32])[0]))
    for number in range(4000):
        width = (1, 16)[number % 2]
        more = 0.1 * (width - 1)
        scale.observe_verify(1, width, more + float(BASE.verify_ms(1, [width])[0]))
    table = scale.table(scale.coefficients())
    assert np.diff(table.verify_ms(1, [1, 16]))[0] == pytest.approx(4.5, rel=0.1)


def test_a_compilation_does_not_count_after_long_either() -> None:
    scale = CostScale(BASE)
    for _ in range(300):
        scale.observe_verify(1, 1, 5.0)
        scale.observe_draft(1, 4, 20.0)
    for _ in range(5000):
        scale.observe_verify(1, 1, 5.0)
    scale.observe_draft(1, 4, 50.0)
    assert scale.table(scale.coefficients()).draft_ms([1], 4)[0] < 2.5


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 16), st.floats(0, 200), st.integers(0, 10**6)),
        min_size=1,
        max_size=30,
    ),
    st.booleans(),
)
def test_whatever_steps_take_the_table_is_one(
    steps: list[tuple[int, int, float, int]], is_timed: bool
) -> None:
    learned = CostScale(BASE) if is_timed else CostFit(BASE.widths)
    for n, width, milliseconds, num_context in steps:
        learned.observe_verify(n, width, milliseconds, num_context=num_context)
        learned.observe_extend(n, width, milliseconds / 3)
        learned.observe_draft(n, width, milliseconds / 2)
        learned.observe_rest(n, milliseconds / 7)
        learned.table(learned.coefficients())  # StepCosts refuses times that fall


def test_one_time_far_off_changes_little() -> None:
    scale = CostScale(BASE)
    for _ in range(100):
        scale.observe_verify(1, 1, 5.0)
    scale.observe_verify(1, 1, 5000.0)
    table = scale.table(scale.coefficients())
    assert table.verify_ms(1, [1])[0] == pytest.approx(5.0, rel=0.05)


def test_first_steps_that_wait_for_what_is_compiled_leave_the_table_as_it_is() -> None:
    scale = CostScale(BASE)
    for n in range(1, 5):
        scale.observe_verify(n, 16, 9 * BASE.verify_ms(n, [16])[0])
        scale.observe_extend(n, 16, 30.0)
        scale.observe_draft(n, 4, 40.0)
        scale.observe_rest(n, 60.0)
    assert scale.table(scale.coefficients()).verify == BASE.verify
    for _ in range(60):
        scale.observe_verify(1, 16, BASE.verify_ms(1, [16])[0])
        scale.observe_rest(1, 0.5)
    table = scale.table(scale.coefficients())
    assert table.verify_ms(1, [16])[0] == pytest.approx(BASE.verify_ms(1, [16])[0] + 0.5, rel=0.05)
    assert table.draft_extend == BASE.draft_extend
    assert table.draft_round == BASE.draft_round


@pytest.mark.parametrize("every", [2, 4, 10])
def test_steps_of_a_shape_that_stay_far_off_are_followed(every: int) -> None:
    scale = CostScale(BASE)
    for number in range(2000):  # the table is wrong for the wide ones
        wide = number % every == 0
        scale.observe_verify(8, 16 if wide else 1, 100.0 if wide else 7.0)
    table = scale.table(scale.coefficients())
    assert table.verify_ms(8, [16])[0] > 28.0


def test_a_part_that_was_not_timed_may_take_what_the_table_says() -> None:
    scale = CostScale(BASE)
    for _ in range(100):
        scale.observe_verify(1, 1, 0.2 * 5.0)
    for _ in range(20):
        scale.observe_draft(1, 4, 1.5)
    assert scale.table(scale.coefficients()).draft_ms([1], 4)[0] == pytest.approx(1.5, rel=0.2)


def test_a_part_that_the_table_has_for_nothing_may_take_time() -> None:
    free = BASE.model_copy(update={"draft_round": (0.0, 0.0)})
    scale = CostScale(free)
    for _ in range(300):
        scale.observe_draft(4, 1, 2.0)
    table = scale.table(scale.coefficients())
    assert table.draft_ms([4], 1)[0] == pytest.approx(2.0, rel=0.05)
    assert table.draft_ms([4], 8)[0] == pytest.approx(2.0, rel=0.05)


def test_another_process_makes_the_same_table_of_the_coefficients() -> None:
    scale = CostScale(BASE)
    for n in (1, 8, 2):
        scale.observe_verify(n, 16, 11.0)
        scale.observe_rest(n, 1.0)
    coefficients = scale.coefficients()
    assert CostScale(BASE).table(coefficients) == scale.table(coefficients)


def test_what_lies_behind_steps_that_are_waited_for_is_apart_from_what_lies_behind_all() -> None:
    scale = CostScale(BASE, runs_ahead=True)
    for step in range(200):
        n = 1 + step % 8
        scale.observe_verify(n, 1, float(BASE.verify_ms(n, [1])[0]))
        scale.observe_rest(n, 0.25, is_before_ahead=True)
        if step % 4 == 0:
            scale.observe_rest(n, 2.25 + 0.125 * n)
    table = scale.table(scale.coefficients())
    for n in (1, 8):
        waited = table.wait_ms(n)
        assert waited == pytest.approx(2 + 0.125 * n, abs=0.05)
        always = table.verify_ms(n, [1])[0] - BASE.verify_ms(n, [1])[0]
        assert always == pytest.approx(0.25, abs=0.05)
    # A server whose steps do not run ahead has it in each.
    alike = CostScale(BASE)
    for _ in range(200):
        alike.observe_rest(1, 2.0)
    table = alike.table(alike.coefficients())
    assert table.wait is None
    assert table.verify_ms(1, [1])[0] == pytest.approx(7, abs=0.1)


def test_as_long_as_no_step_was_seen_ahead_nothing_lies_before_it() -> None:
    scale = CostScale(BASE, runs_ahead=True)
    for _ in range(50):
        scale.observe_rest(4, 3.0)
    table = scale.table(scale.coefficients())
    assert table.wait_ms(4) == pytest.approx(3, abs=0.1)
    assert table.verify == BASE.verify


def test_a_wait_that_is_shorter_than_what_always_lies_there_is_none() -> None:
    scale = CostScale(BASE, runs_ahead=True)
    for _ in range(50):
        scale.observe_rest(4, 1.0, is_before_ahead=True)
        scale.observe_rest(4, 0.5)
    assert scale.table(scale.coefficients()).wait is None


# Beside BASE its nodes take little.
EVEN = BASE.model_copy(update={"verify": ((5.0, 8.0), (7.0, 9.4))})


def steps_of(contexts: list[int], num: int) -> list[tuple[int, int, int]]:
    """Requests, width and tokens of context of so many steps, whose requests all have one of these
    numbers of tokens for some steps."""
    shapes = ((1, 1), (8, 1), (3, 5), (8, 16))
    return [
        (n, width, n * contexts[number // 40 % len(contexts)])
        for number in range(num)
        for n, width in [shapes[number % len(shapes)]]
    ]


def test_what_contexts_take_is_known_apart_from_the_rest() -> None:
    scale, random = CostScale(BASE), np.random.default_rng(3)
    for n, width, num_context in steps_of([200, 4000], 1200):
        exact = 1.2 * float(BASE.verify_ms(n, [width])[0]) + 0.0004 * num_context
        noise = 1 + 0.05 * random.standard_normal()
        scale.observe_verify(n, width, noise * exact, num_context=num_context)
    table = scale.table(scale.coefficients())
    assert table.context == pytest.approx(0.4, rel=0.1)
    for n, width in ((1, 1), (8, 1), (8, 16)):
        found = table.verify_ms(n, [width])[0]
        assert found == pytest.approx(1.2 * float(BASE.verify_ms(n, [width])[0]), rel=0.1)


@pytest.mark.parametrize("are_alike", [True, False])
def test_contexts_that_are_alike_leave_all_to_the_table(are_alike: bool) -> None:
    with_contexts, without = CostScale(BASE), CostScale(BASE)
    for n, width, num_context in steps_of([1000, 3000], 800):
        expected = float(BASE.verify_ms(n, [width])[0])
        taken = expected + num_context / 2000
        counted = 2000 * n if are_alike else num_context
        with_contexts.observe_verify(n, width, taken, num_context=counted)
        without.observe_verify(n, width, taken)
    found, wanted = (each.table(each.coefficients()) for each in (with_contexts, without))
    assert (found.context_ms(2000) < 0.01) is are_alike
    is_same = np.array(found.verify) == pytest.approx(np.array(wanted.verify), rel=1e-3)
    assert is_same is are_alike


@pytest.mark.parametrize("share_of_others", [0.0, 0.1])
def test_contexts_do_not_take_what_the_nodes_of_wide_steps_take(share_of_others: float) -> None:
    """Chats are decoded plainly and documents verify wide drafts, but for looks."""
    scale, random = CostScale(EVEN), np.random.default_rng(0)
    for step in range(1500):
        is_document = step // 200 % 2 == 1
        is_wide = is_document
        if step % 256 == 255 or random.random() < share_of_others:
            is_wide = not is_document
        width = 16 if is_wide else 1
        taken = (7 + 0.05 * 8 * (width - 1)) * (1 + 0.05 * random.standard_normal())
        scale.observe_verify(8, width, taken, num_context=8 * (4000 if is_document else 200))
    narrow, wide = scale.table(scale.coefficients()).verify_ms(8, [1, 16])
    # Six in truth; before contexts were known it was 5.8.
    assert wide - narrow == pytest.approx(6.0, rel=0.1 if share_of_others else 0.35)


def test_contexts_do_not_take_what_more_requests_take() -> None:
    scale, random = CostScale(EVEN), np.random.default_rng(1)
    for step in range(1500):  # the table has 5 and 7 ms
        n, exact = ((1, 6.0), (8, 14.0))[step % 2]
        num_context = n * int(random.integers(300, 700))
        taken = exact * (1 + 0.05 * random.standard_normal())
        scale.observe_verify(n, 1, taken, num_context=num_context)
    table = scale.table(scale.coefficients())
    assert table.verify_ms(1, [1])[0] + table.context_ms(30_000) == pytest.approx(6, rel=0.15)
    assert table.verify_ms(8, [1])[0] + table.context_ms(400) == pytest.approx(14, rel=0.05)


def test_a_machine_that_slows_down_while_contexts_grow_a_little_is_slower() -> None:
    """Where contexts hardly differ, what they take is a guess: it may be no large one."""
    scale = CostScale(BASE)
    for number in range(500):
        scale.observe_verify(8, 1, 7.0 * (1 + number / 1000), num_context=8 * (2000 + number // 10))
    table = scale.table(scale.coefficients())
    assert table.verify_ms(8, [1])[0] > 0.5 * 7.0


def test_longer_contexts_that_take_less_take_nothing() -> None:
    scale = CostScale(BASE)
    for n, width, num_context in steps_of([200, 4000], 400):
        taken = float(BASE.verify_ms(n, [width])[0]) * (1.5 if num_context < 2000 else 0.9)
        scale.observe_verify(n, width, taken, num_context=num_context)
    assert scale.table(scale.coefficients()).context is None


def test_where_contexts_take_all_something_is_left_to_the_nodes() -> None:
    scale = CostScale(BASE)
    for number, (n, width, num_context) in enumerate(steps_of([100, 8000], 2400)):
        scale.observe_verify(n, width, 0.001 * num_context, num_context=num_context)
        if number % 64 == 0:  # what is known by now says what is far off
            scale.coefficients()
    table = scale.table(scale.coefficients())
    assert table.verify_ms(1, [1])[0] > 0.05 * 5.0
    assert table.verify_ms(8, [1])[0] + table.context_ms(64_000) == pytest.approx(64, rel=0.1)


def test_shorter_contexts_are_priced_at_once_and_not_by_and_by() -> None:
    scale = CostScale(BASE)
    for n, width, num_context in steps_of([1500, 4000], 1200):
        taken = float(BASE.verify_ms(n, [width])[0]) + 0.0005 * num_context
        scale.observe_verify(n, width, taken, num_context=num_context)
    table = scale.table(scale.coefficients())
    for n in (1, 8):
        found = table.verify_ms(n, [1])[0] + table.context_ms(50 * n)
        assert found == pytest.approx(float(BASE.verify_ms(n, [1])[0]) + 0.025 * n, rel=0.1)


def test_where_contexts_and_nodes_take_all_a_plain_step_still_takes_time() -> None:
    scale, random = CostScale(EVEN), np.random.default_rng(2)
    for number in range(2000):
        n, width = (1, 8)[number % 2], (1, 16)[number // 2 % 2]
        num_context = n * int(random.integers(10, 4000))
        taken = 0.01 * num_context + 0.3 * n * (width - 1)
        scale.observe_verify(n, width, taken, num_context=num_context)
        if number % 64 == 0:
            scale.coefficients()
    table = scale.table(scale.coefficients())
    assert table.verify_ms(1, [1])[0] > 0
    assert table.context == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("widths", [(2, 8), (4, 4, 4, 4, 4, 4, 4, 4, 1, 32)])
def test_widths_that_no_step_had_keep_their_price_where_contexts_take_half(
    widths: tuple[int, ...],
) -> None:
    batch_sizes, columns = (1, 4, 16, 64), (1, 2, 4, 8, 16, 32)
    right = BASE.model_copy(
        update={
            "batch_sizes": batch_sizes,
            "widths": columns,
            "verify": tuple(
                tuple(2 + 0.02 * n + 0.01 * n * w for w in columns) for n in batch_sizes
            ),
            "draft_round": (0.5,) * 4,
            "draft_extend": ((0.2,) * 6,) * 4,
        }
    )
    scale, random = CostScale(right), np.random.default_rng(4)
    for number in range(400):
        width, num_context = widths[number % len(widths)], 16 * int(random.integers(60, 1900))
        exact = float(right.verify_ms(16, [width])[0]) + 3e-4 * num_context
        taken = exact * (1 + 0.02 * random.standard_normal())
        scale.observe_verify(16, width, taken, num_context=num_context)
        if number % 64 == 0:
            scale.coefficients()
    table = scale.table(scale.coefficients())
    for n in (16, 64):
        assert table.verify_ms(n, columns) == pytest.approx(right.verify_ms(n, columns), rel=0.15)
