"""Steps without drafts that need not wait for the tokens of the last, weighed against drafts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from sglang_hvd.allocation import DrafterChoices, PredictedDrafts, StepAllocator
from sglang_hvd.costs import StepCosts
from tests.allocation.fixed_drafts import of_model_only

NUM = 16
WIDTHS = (1, 2, 4, 8)
PLAIN_MS = 8.0


def costs(wait: float | None) -> StepCosts:
    """Of steps that take little more for more nodes, and a model drafter that never pays."""
    return StepCosts(
        about="made up",
        batch_sizes=(1, NUM),
        widths=(1, 8),
        verify=((PLAIN_MS, 9.0), (PLAIN_MS, 12.0)),
        draft_round=(50.0, 50.0),
        draft_once=(50.0, 50.0),
        draft_extend=((0.0, 0.0), (0.0, 0.0)),
        wait=None if wait is None else (wait, wait),
    )


def allocator(wait: float | None, *, runs_ahead: bool = True) -> StepAllocator:
    made = StepAllocator(
        costs(wait), widths=WIDTHS, drafters=[DrafterChoices((1,), (1,))], runs_ahead=runs_ahead
    )
    for slot in range(NUM):
        made.start(slot)
    return made


SLOTS = np.arange(NUM, dtype=np.int32)


def odds(has_draft: npt.NDArray[np.bool_], prob: float = 0.9) -> PredictedDrafts:
    """Drafts of seven tokens, each right so often after those before it."""
    depths = np.arange(1, 8, dtype=np.int32)
    nothing = np.zeros((NUM, 1, 1), np.float32)
    return PredictedDrafts(
        np.tile((prob**depths).astype(np.float32), (NUM, 1)),
        np.tile(depths, (NUM, 1)),
        np.where(has_draft, 7, 0).astype(np.int32),
        nothing,
        nothing,
    )


def speed(
    made: StepAllocator,
    wait: float,
    share: float,
    *,
    runs_ahead: bool,
    prob: float = 0.9,
    true_prob: float | None = None,
    num_steps: int = 3000,
) -> float:
    """Tokens of a request per millisecond, as a server steps: share of the requests have a draft,
    others in each step. What is wanted while steps run ahead is wanted for the step before: here,
    other than in texts, that says nothing of the next.

    prob, true_prob: of a token of a draft, as it is predicted and as it is.
    """
    random = np.random.default_rng(0)
    num_tokens, ms, is_ahead = 0, 0.0, False
    for _ in range(num_steps):
        given = odds(random.random(NUM) < share, prob)
        if is_ahead:
            num_cache, width = np.zeros(NUM, np.int32), 1
            is_ahead = not made.wants_drafts(SLOTS, given)
        else:
            ms += wait
            found = made.allocate(SLOTS, given, next_waits=not runs_ahead)
            num_cache, width = found.num_host, found.width
            is_ahead = runs_ahead and width == 1
        ms += made.costs.verify_ms(NUM, [width])[0]
        accepted = np.minimum(random.geometric(1 - (true_prob or prob), NUM) - 1, num_cache)
        num_tokens += int(accepted.sum()) + NUM
        made.observe(SLOTS, (accepted + 1).astype(np.int32))
    return num_tokens / ms / NUM


@pytest.mark.parametrize("share", [0.0, 0.05, 0.15, 0.3, 0.6, 1.0])
def test_it_is_as_fast_as_waiting_always_or_never(share: float) -> None:
    wait = 5.0
    ahead = speed(allocator(wait), wait, share, runs_ahead=True)
    always = speed(allocator(wait, runs_ahead=False), wait, share, runs_ahead=False)
    plain = 1 / PLAIN_MS
    assert ahead > 0.97 * max(always, plain)
    if share == 0:
        assert always < 0.65 * plain
    if share == 1:
        assert always > 1.5 * plain


@pytest.mark.parametrize(("prob", "true_prob"), [(0.7, 0.5), (0.6, 0.3), (0.7, 0.7)])
def test_drafts_that_bring_less_than_was_expected_are_not_waited_for(
    prob: float, true_prob: float
) -> None:
    wait = 5.0

    def of(made: StepAllocator, *, runs_ahead: bool) -> float:
        return speed(made, wait, 0.7, runs_ahead=runs_ahead, prob=prob, true_prob=true_prob)

    ahead = of(allocator(wait), runs_ahead=True)
    always = of(allocator(wait, runs_ahead=False), runs_ahead=False)
    assert ahead > 0.97 * max(always, 1 / PLAIN_MS)


@pytest.mark.parametrize(("prob", "num_bad", "bad_prob"), [(0.6, 2000, 0.2), (0.6, 300, 0.4)])
def test_drafts_are_waited_for_again_when_they_bring_what_is_expected(
    prob: float, num_bad: int, bad_prob: float
) -> None:
    wait = 5.0
    made = allocator(wait)
    speed(made, wait, 1.0, runs_ahead=True, prob=0.8, true_prob=bad_prob, num_steps=num_bad)
    speed(made, wait, 1.0, runs_ahead=True, prob=prob, num_steps=3000)
    again = speed(made, wait, 1.0, runs_ahead=True, prob=prob)
    assert again > 0.97 * speed(allocator(wait), wait, 1.0, runs_ahead=True, prob=prob)
    assert again > 1.1 / PLAIN_MS


def test_without_running_ahead_every_step_has_the_wait() -> None:
    given = odds(SLOTS < 3)
    waiting = allocator(5.0, runs_ahead=False)
    in_steps = StepAllocator(
        costs(None).model_copy(update={"verify": ((13.0, 14.0), (13.0, 17.0))}),
        widths=WIDTHS,
        drafters=[DrafterChoices((1,), (1,))],
    )
    for slot in range(NUM):
        in_steps.start(slot)
    for _ in range(50):
        first, second = (made.allocate(SLOTS, given) for made in (waiting, in_steps))
        assert first.num_host.tolist() == second.num_host.tolist()


@pytest.mark.parametrize("prob", [0.3, 0.35, 0.4, 0.45, 0.9])
def test_steps_that_wait_anyway_have_the_drafts_of_a_server_whose_always_do(prob: float) -> None:
    """As those of a batch with a grammar."""
    wait = 6.0
    found, expected = (
        speed(allocator(wait, runs_ahead=may), wait, 1.0, runs_ahead=False, prob=prob)
        for may in (True, False)
    )
    assert found == pytest.approx(expected, rel=0.01)


def test_a_wait_is_made_for_drafts_that_are_worth_it() -> None:
    made = allocator(5.0)
    assert not made.wants_drafts(SLOTS, odds(SLOTS < 0))
    assert not made.wants_drafts(SLOTS, odds(SLOTS < 1))
    assert made.wants_drafts(SLOTS, odds(SLOTS < NUM))


def test_drafts_that_no_step_behind_makes_up_for_are_left() -> None:
    made, nothing = allocator(5.0), odds(SLOTS < 0)
    few = odds(SLOTS < 3)
    assert made.allocate(SLOTS, few).width > 1  # at first: steps behind them may have more
    for _ in range(100):
        made.allocate(SLOTS, odds(SLOTS < NUM))
        assert made.allocate(SLOTS, nothing).width == 1  # a wait for nothing, behind drafts
    assert made.allocate(SLOTS, few).width == 1
    assert made.allocate(SLOTS, odds(SLOTS < NUM)).width > 1


def test_drafts_are_looked_at_while_steps_run_ahead() -> None:
    made = allocator(500.0)
    one = odds(SLOTS < 1)
    answers = [made.wants_drafts(SLOTS, one) for _ in range(300)]
    assert not any(answers[:250])
    assert all(answers[260:])
    looked_at = [made.allocate(SLOTS, one) for _ in range(3)]
    # One drafts with the model drafter, and the cache's draft that there is is verified.
    assert sum(int(found.num_model.sum()) for found in looked_at) == 1
    assert sum(int(found.num_host.sum()) for found in looked_at) >= 1
    assert not made.wants_drafts(SLOTS, one)


def test_requests_bound_to_the_model_drafter_are_never_left_without() -> None:
    made = allocator(500.0)
    nothing = odds(SLOTS < 0)
    assert not made.wants_drafts(SLOTS, nothing)
    bound = of_model_only(SLOTS == 3, 1)
    assert made.wants_drafts(SLOTS, nothing, bound)
    found = made.allocate(SLOTS, nothing, bound)
    assert found.num_model.tolist() == [int(slot == 3) for slot in SLOTS]
