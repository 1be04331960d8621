"""Replay of many sessions at a time: what is served, its costs, and what the oracle knows."""

from collections.abc import Collection

import numpy as np
import pytest

from sglang_hvd.allocation import MAX_POSTPONED_TOKENS, DrafterChoices, DraftExtend, StepAllocator
from sglang_hvd.config import HvdConfig, Policy
from sglang_hvd.costs import StepCosts
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import TokenClasses
from sglang_hvd.replay.core.batch import ORACLE, BatchReplay, DrawnTrace
from sglang_hvd.replay.core.replayed import ReplayedCycle
from sglang_hvd.replay.core.single_cycles import DraftPlan, VerifyOutcome
from sglang_hvd.replay.core.totals import CycleTotals, PlanCosts, count_cycles
from sglang_hvd.suffix_cache import SuffixCache
from tests.payoff.made_up import constant_survival
from tests.traces.made_up import trace

CLASSES = TokenClasses.from_strings(["a", ",", "("])
WIDTHS, SIZES = (1, 2, 4, 8), (1, 3)
NUM_STEPS = 3

# A step takes 10 ms and 1 ms for each request, a drafter round 2 ms and a draft-extend 1 ms.
COSTS = StepCosts(
    about="made up",
    batch_sizes=(1, 2),
    widths=(1, 8),
    verify=((11, 11), (12, 12)),
    draft_round=(2, 2),
    draft_extend=((1, 1), (1, 1)),
)


def costs_with_extend(per_token: float) -> StepCosts:
    extend = tuple(per_token * width for width in (1, 128))
    verify = ((11, 11), (12, 12))
    update = {"widths": (1, 128), "verify": verify, "draft_extend": (extend, extend)}
    return COSTS.model_copy(update=update)


def drawn(prompt: list[int], output: list[int], accepted: int = 0) -> DrawnTrace:
    by_size = {
        size: np.full(len(output), min(accepted, size), np.int32) for size in (*SIZES, NUM_STEPS)
    }
    return DrawnTrace(trace(prompt, output), by_size)


def fresh(num_tokens: int, seed: int) -> list[int]:
    """Text that no draft contains."""
    return list(range(1000 * seed, 1000 * seed + num_tokens))


def replay(
    policy: Policy,
    *,
    prob: float = 0.5,
    knows: Collection[str] = (),
    picks_nodes: bool = False,
    costs: StepCosts = COSTS,
    shared_cache_tokens: int = 10_000,
    runs_ahead: bool = False,
) -> BatchReplay:
    config = HvdConfig(policy=policy, calibrate=False, shared_cache_tokens=shared_cache_tokens)
    allocator = None
    if policy == "allocate":
        allocator = StepAllocator(
            costs,
            widths=WIDTHS,
            drafters=[DrafterChoices(SIZES, (NUM_STEPS,))],
            runs_ahead=runs_ahead,
        )
    drafter = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=constant_survival(prob) if config.predicts else None,
        token_classes=CLASSES if config.predicts else None,
        num_model_steps=NUM_STEPS,
        num_model_nodes=SIZES[-1],
        verify_width=WIDTHS[-1],
        allocator=allocator,
    )
    return BatchReplay(
        drafter,
        PlanCosts(costs, WIDTHS, DraftExtend.of(config, default="never")),
        knows=knows,
        picks_nodes=picks_nodes,
        model_sizes=SIZES,
        num_model_steps=NUM_STEPS,
        runs_ahead=runs_ahead,
    )


def test_steps_that_run_ahead_do_not_wait_and_find_copies_a_token_late() -> None:
    dear = COSTS.model_copy(update={"draft_round": (500, 500), "wait": (5, 5)})
    novel = [[drawn([1], fresh(401, 1))]]
    copied = fresh(40, 2)
    text = [token for n in range(8) for token in (*fresh(5, 10 + n), *copied)]
    copying = [[drawn([1, *copied], text)]]
    found = {
        (name, runs_ahead): replay("allocate", prob=0.95, costs=dear, runs_ahead=runs_ahead).serve(
            sessions, batch_size=1, num_tokens=100
        )
        for name, sessions in (("novel", novel), ("copying", copying))
        for runs_ahead in (True, False)
    }
    assert found["novel", False].ms == 100 * (11 + 1 + 5)
    assert found["novel", True].ms == 100 * (11 + 1)
    # Each copy has one more step without drafts, and some waits fewer.
    ahead, waits = found["copying", True], found["copying", False]
    assert ahead.num_accepted > 0
    assert ahead.cycles_per_1k_tokens is not None
    assert waits.cycles_per_1k_tokens is not None
    assert waits.cycles_per_1k_tokens < ahead.cycles_per_1k_tokens
    assert ahead.num_tokens / ahead.ms > waits.num_tokens / waits.ms


def test_a_cycle_costs_what_the_table_says() -> None:
    sessions = [[drawn([1], fresh(401, 1), accepted=2)]]
    totals = replay("model").serve(sessions, batch_size=1, num_tokens=300)
    # Three tokens in each step of 11 + 1 ms and two rounds.
    assert totals.num_tokens == 3 * totals.num_steps == 300
    assert totals.ms == totals.num_steps * (11 + 1 + 2 * 2)
    assert (totals.num_model, totals.num_accepted) == (totals.num_cycles, 200)


def test_longer_texts_have_longer_steps_if_the_table_says_so() -> None:
    table = COSTS.model_copy(update={"context": 2.0})
    plain = DraftPlan("plain", None, None)
    priced = PlanCosts(table, WIDTHS, DraftExtend.EVERY_STEP)
    assert priced.ms([plain], [0], 0, num_context=500) == 11 + 1 + 1
    prompt, output = fresh(30, 1), fresh(11, 2)
    totals = replay("cache", costs=table).serve(
        [[drawn(prompt, output)]], batch_size=1, num_tokens=100
    )
    # Ten plain steps for each repetition. The first has a context of the prompt and one token.
    mean = len(prompt) + 1 + 9 / 2
    assert totals.num_steps == 100
    assert totals.ms == pytest.approx(100 * (11 + 0.002 * mean))  # policy `cache` extends nothing
    one = count_cycles(
        [ReplayedCycle(plain, VerifyOutcome(np.array([7], np.int32), 0), None)] * 10,
        priced,
        num_context=len(prompt) + 1,
    )
    assert one.ms == pytest.approx(10 * (11 + 1 + 0.002 * mean))


def test_a_postponed_draft_extend_is_paid_for_when_a_request_drafts() -> None:
    table = costs_with_extend(per_token=0.5)
    priced = PlanCosts(table, WIDTHS, DraftExtend.WHEN_DRAFTING)
    plain = DraftPlan("plain", None, None)
    model = DraftPlan("model", None, None, SIZES[0], NUM_STEPS)
    assert priced.ms([plain], [40], 1) == table.verify_ms(1, [1])[0]
    without = priced.ms([model, plain], [0, 20], 0)
    assert priced.ms([model, plain], [6, 20], 0) - without == pytest.approx(
        table.draft_extend_ms(1, [6])[0]
    )
    # A request with more missing tokens joins.
    assert priced.ms([model, plain], [6, 40], 0) - without == pytest.approx(
        table.draft_extend_ms(2, [23])[0]
    )
    # It does not wait forever: at some point it catches up anyway.
    assert priced.ms([plain], [MAX_POSTPONED_TOKENS], 1) > priced.ms([plain], [40], 1)
    always = PlanCosts(table, WIDTHS, DraftExtend.EVERY_STEP)
    assert always.ms([plain], [40], 1) == pytest.approx(
        table.verify_ms(1, [1])[0] + table.draft_extend_ms(1, [1])[0]
    )


def test_a_run_of_steps_without_drafts_is_paid_for_by_the_step_after_it() -> None:
    table = costs_with_extend(per_token=0.5)
    priced = PlanCosts(table, WIDTHS, DraftExtend.AFTER_DRAFTS)
    plain = DraftPlan("plain", None, None)
    model = DraftPlan("model", None, None, SIZES[0], NUM_STEPS)
    assert WIDTHS[0] == 1
    assert (priced.num_plain([plain, plain], 7), priced.num_plain([model, plain], 7)) == (8, 0)
    of_step = table.verify_ms(2, [1])[0]
    assert priced.ms([plain, plain], [0, 0], 8) == of_step + table.draft_extend_ms(2, [1])[0]
    assert priced.ms([plain, plain], [5, 9], 20) == of_step
    without = PlanCosts(table, WIDTHS, DraftExtend.EVERY_STEP).ms([model, plain], [0, 0], 0)
    assert priced.ms([model, plain], [0, 0], 0) == without
    # Both requests catch up in one forward pass.
    assert priced.ms([model, plain], [5, 9], 0) - without == pytest.approx(
        table.catch_up_ms([2], 7)[0]
    )
    assert priced.missing_after([plain, plain], [5, 9], [1, 1], 20) == [6, 10]
    assert priced.missing_after([model, plain], [5, 9], [3, 1], 0) == [0, 0]


def test_a_run_ahead_waits_if_it_must_catch_up() -> None:
    dear = costs_with_extend(per_token=0.5).model_copy(
        update={"draft_round": (500, 500), "wait": (5, 5)}
    )
    novel = [[drawn([1], fresh(401, 1))]]
    made = replay("allocate", costs=dear, runs_ahead=True)
    made._costs = PlanCosts(dear, WIDTHS, DraftExtend.AFTER_DRAFTS)
    totals = made.serve(novel, batch_size=1, num_tokens=128)
    # Two of 128 steps catch up, and wait.
    assert totals.num_steps == 128
    caught_up = 2 * (5 + dear.catch_up_ms([1], MAX_POSTPONED_TOKENS)[0])
    assert totals.ms == pytest.approx(128 * 11 + caught_up)


def test_a_request_that_drafts_in_every_step_catches_up_with_what_it_committed() -> None:
    table = costs_with_extend(per_token=0.5)
    sessions = [[drawn([1], fresh(401, 1), accepted=2)]]
    made = replay("model", costs=table)
    made._costs = PlanCosts(table, WIDTHS, DraftExtend.WHEN_DRAFTING)
    totals = made.serve(sessions, batch_size=1, num_tokens=90)
    rounds = table.draft_ms([1], NUM_STEPS)[0]
    width = next(width for width in WIDTHS if width > SIZES[-1])
    # Three tokens in each step.
    step = table.verify_ms(1, [width])[0] + rounds + table.draft_extend_ms(1, [3])[0]
    assert totals.ms == pytest.approx(totals.num_steps * step)


def test_without_the_model_drafter_nothing_is_paid_for_it() -> None:
    totals = replay("cache").serve([[drawn([1], fresh(101, 1))]], batch_size=1, num_tokens=50)
    assert totals.ms == 11 * totals.num_steps == 11 * totals.num_tokens


def test_a_batch_shares_its_steps_and_is_always_full() -> None:
    sessions = [[drawn([1], fresh(60, n))] for n in range(1, 4)]
    totals = replay("cache").serve(sessions, batch_size=2, num_tokens=100)
    assert totals.num_cycles == 2 * totals.num_steps == totals.num_tokens
    assert totals.ms == 12 * totals.num_steps


def test_a_batch_starts_spread_over_the_texts() -> None:
    text = fresh(400, 1)  # new in the first turn, known in the second
    totals = replay("cache").serve(
        [[drawn([1], text), drawn([2], text)]], batch_size=16, num_tokens=160
    )
    assert 0.2 < totals.num_cache / totals.num_cycles < 0.6


def test_a_slot_starts_at_its_share_of_all_tokens() -> None:
    turns = [drawn([1], fresh(9, 1)), drawn([4], fresh(5, 2)), drawn([5], fresh(9, 3))]
    # Prefill generates each turn's first token: 8, 4 and 8 of 20 tokens remain.
    for share, turn, position in (
        *((0.0, 0, 1), (0.05, 0, 2), (0.36, 0, 8), (0.4, 1, 1), (0.56, 1, 4)),
        *((0.6, 2, 1), (0.95, 2, 8), (0.999, 2, 8)),
    ):
        request = replay("cache")._started_at(share, turns, [])
        assert (turns.index(request.drawn), request.position) == (turn, position), share


def test_a_slot_knows_all_texts_before_its_own() -> None:
    text = fresh(80, 1)
    sessions = [[drawn([1], text)], [drawn([2], text)]]
    # Both have 79 tokens, so the second starts at a share of one half.
    made = replay("cache")
    turns = [turn for of_session in sessions for turn in of_session]
    request = made._started_at(0.51, turns, [])
    assert request.drawn is turns[1]
    assert made._step([request]).num_accepted > 0
    request = replay("cache")._started_at(0.49, turns, [])
    assert request.drawn is turns[0]
    assert made._step([made._started_at(0.3, turns, [])]).num_accepted == 0


def test_a_few_slots_move_to_other_places_meanwhile() -> None:
    # Only the last fifth of the text is a copy.
    num_novel, num_copied = 64_000, 16_000
    prompt = fresh(num_copied, 1000)
    sessions = [[drawn(prompt, [*range(num_novel), *prompt])]]
    found = {
        num_tokens: replay("cache").serve(sessions, batch_size=1, num_tokens=num_tokens)
        for num_tokens in (255, 8 * 256)
    }
    assert found[255].num_accepted == 0  # from the beginning alone
    num_accepted = found[8 * 256].num_accepted
    assert 0.05 < num_accepted / found[8 * 256].num_tokens < 0.25


def test_slots_of_a_batch_do_not_draft_from_each_other() -> None:
    sessions = [[drawn([1], fresh(40, 1))], [drawn([2], fresh(40, 2))]]
    totals = replay("cache").serve(sessions, batch_size=16, num_tokens=2000)
    assert totals.num_accepted == 0


def test_turns_follow_each_other_and_draft_from_those_before() -> None:
    output = fresh(65, 1)
    once = [drawn([1], output)]
    twice = [drawn([1], output), drawn([2], output)]
    # The first 64 tokens are not counted, so of two turns only the second counts.
    of_once = replay("cache").serve([once], batch_size=1, num_tokens=60)
    of_twice = replay("cache").serve([twice], batch_size=1, num_tokens=60)
    assert of_once.num_cache == 0
    assert of_twice.num_accepted > 40


def test_a_session_does_not_draft_from_its_own_repetition() -> None:
    sessions = [[drawn([1], fresh(40, 1))]]
    for batch_size in (1, 3):
        made = replay("cache")
        for _ in range(2):
            totals = made.serve(sessions, batch_size=batch_size, num_tokens=39)
            assert totals.num_accepted == 0


def test_every_repetition_starts_with_the_earlier_traces() -> None:
    output = fresh(40, 1)
    totals = replay("cache").serve(
        [[drawn([1], output)]],
        earlier=[trace([5], output)],
        batch_size=1,
        num_tokens=39,
    )
    assert totals.num_accepted > 20


def test_namespaces_draft_from_their_own_outputs() -> None:
    output = fresh(40, 1)
    for other, is_known in (("", True), ("b", False)):
        totals = replay("cache").serve(
            [[drawn([1], output)]],
            earlier=[trace([5], output, namespace=other)],
            batch_size=1,
            num_tokens=39,
        )
        assert (totals.num_accepted > 20) is is_known


def test_the_oracle_verifies_what_is_right_and_nothing_else() -> None:
    output = fresh(40, 1)
    wrong = [*output[:20], *fresh(20, 9)]
    # The first half of each text is a copy of its prompt; the predictor trusts nothing.
    sessions = [[drawn(output, wrong, accepted=0)]]
    blind = replay("allocate", prob=0.01).serve(sessions, batch_size=1, num_tokens=39)
    oracle = replay("allocate", prob=0.01, knows=ORACLE).serve(
        sessions, batch_size=1, num_tokens=39
    )
    assert oracle.num_accepted >= 15
    assert oracle.num_model == oracle.num_both == 0
    assert oracle.num_tokens / oracle.ms > blind.num_tokens / blind.ms


@pytest.mark.parametrize("known", ["cache", "model"])
def test_knowing_one_draft_says_nothing_about_the_other(known: str) -> None:
    # Both drafts are always right, or neither; the predictor trusts no cache draft.
    text = fresh(40, 1)
    of_right = [[drawn(text, text, accepted=2)]]
    # In the prompt another token follows each token of the text.
    wrong_copy = [token for kept in text for token in (kept, kept + 500)]
    of_wrong = [[drawn(wrong_copy, text, accepted=0)]]
    right, wrong = (
        replay("allocate", prob=0.01, knows=[known]).serve(sessions, batch_size=1, num_tokens=39)
        for sessions in (of_right, of_wrong)
    )
    if known == "cache":
        assert right.num_cache == right.num_cycles
        assert wrong.num_cache == wrong.num_both == 0
        assert wrong.num_model > 0  # thought well of until it is known
    else:
        assert right.num_model > 0.9 * right.num_cycles
        assert wrong.num_model == 0


def test_an_oracle_that_picks_nodes_leaves_out_the_branch_before_the_right_one() -> None:
    keys = range(100, 130)
    rare = [token for key in keys for token in (key, key + 100)]
    usual = [
        token for place, key in enumerate([*keys] * 5) for token in (key, key + 200, 1000 + place)
    ]
    text = [token for key in reversed(keys) for token in (key, key + 100)]
    sessions = [[drawn([*usual, *rare], text, accepted=0)]]
    speeds = []
    dear = COSTS.model_copy(update={"verify": ((11, 18), (12, 26))})
    for picks_nodes in (False, True):
        oracle = replay("allocate", prob=0.6, knows=ORACLE, picks_nodes=picks_nodes, costs=dear)
        totals = oracle.serve(sessions, batch_size=1, num_tokens=40)
        assert totals.num_accepted > 10
        speeds.append(totals.num_tokens / totals.ms)
    assert speeds[0] < speeds[1]


def test_a_draft_of_both_has_the_longer_of_the_two() -> None:
    text = fresh(60, 1)
    sessions = [[drawn(text, text, accepted=1)]]
    totals = replay("both").serve(sessions, batch_size=1, num_tokens=50)
    # The cache draft has 4 tokens, the model drafter's draft 3.
    assert totals.num_both > 0.8 * totals.num_cycles
    assert totals.num_tokens / totals.num_cycles == pytest.approx(5, abs=0.3)


@pytest.mark.parametrize("sessions", [[], [[drawn([1, 2], [3])]], [[drawn([1, 2], [])]]])
def test_sessions_without_a_cycle_are_not_served(sessions: list[list[DrawnTrace]]) -> None:
    totals = replay("cache").serve(sessions, batch_size=2, num_tokens=10)
    assert totals == CycleTotals()
