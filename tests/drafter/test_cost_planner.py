"""The drafter under the policies that verify both drafts of a request."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hvd._native import Pace
from sglang_hvd.allocation import DrafterChoices, StepAllocator
from sglang_hvd.config import HvdConfig, Policy
from sglang_hvd.costs import StepCosts
from sglang_hvd.drafter import HybridDrafter, TreePrediction
from sglang_hvd.payoff import FEATURE_NAMES, AcceptancePredictor, TokenClasses
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.replay.core.single_cycles import (
    DraftPlan,
    VerifyOutcome,
    outcome_batch,
    single_plans,
)
from sglang_hvd.request_stats import RequestStats
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import MODEL_ONLY, VerifyOutcomes
from tests.payoff.made_up import constant_survival, linear

CLASSES = TokenClasses.from_strings(["a", ",", "("])
WIDTHS, SIZES, NUM_STEPS = (1, 2, 4, 8, 16), (3, 7), 3

# 3 tokens match, so the cache draft begins 4, 5, 6.
REPEATS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]


def costs(per_node: float, of_round: float, of_context: float = 0.0) -> StepCosts:
    return StepCosts(
        context=of_context,
        about="made up",
        batch_sizes=(1, 2),
        widths=(1, 16),
        verify=((5 + per_node, 5 + 16 * per_node), (5 + 2 * per_node, 5 + 32 * per_node)),
        draft_round=(of_round, of_round),
        draft_extend=((0, 0), (0, 0)),
    )


def drafter(
    policy: Policy = "allocate",
    *,
    prob: float = 0.7,
    per_node: float = 0.01,
    of_round: float = 0.5,
    of_context: float = 0.0,
    verify_width: int = WIDTHS[-1],
    widths: tuple[int, ...] = WIDTHS,
    base_width: int | None = None,
    predictor: AcceptancePredictor | None = None,
    verifies_trees: bool = True,
    **settings: Any,
) -> HybridDrafter:
    allocator = StepAllocator(
        costs(per_node, of_round, of_context),
        widths=widths,
        base_width=base_width,
        drafters=[DrafterChoices(SIZES, (NUM_STEPS,))],
    )
    config = HvdConfig(policy=policy, **settings)
    if predictor is None and config.predicts:
        predictor = constant_survival(prob)
    return HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=predictor,
        token_classes=CLASSES,
        num_model_steps=NUM_STEPS,
        num_model_nodes=SIZES[-1],
        verify_width=verify_width,
        allocator=allocator,
        verifies_trees=verifies_trees,
    )


def planned(made: HybridDrafter, rid: str = "r") -> DraftPlan:
    made.start(rid, REPEATS)
    made.extend(rid, [3])
    [plan] = single_plans(made.plan([rid]))
    return plan


def drafted(plan: DraftPlan) -> list[int]:
    return [] if plan.cache_draft is None else plan.cache_draft.token_ids.tolist()


def test_both_drafts_share_the_verification() -> None:
    plan = planned(drafter("both"))
    assert plan.source == "both"
    assert (plan.num_model_nodes, plan.num_model_steps) == (7, 3)
    assert drafted(plan) == [4, 5, 6, 7, 8, 9, 1, 2]
    assert plan.num_nodes == 15


def test_the_cache_draft_gets_the_room_that_the_model_tree_leaves() -> None:
    assert drafted(planned(drafter("both", verify_width=10))) == [4, 5]
    plan = planned(drafter("both", verify_width=8))
    assert (plan.source, drafted(plan)) == ("model", [])


def test_without_a_cache_draft_both_is_the_model_draft() -> None:
    made = drafter("both")
    made.start("r", [1, 2, 3])
    [plan] = single_plans(made.plan(["r"]))
    assert (plan.source, plan.cache_draft, plan.num_model_nodes) == ("model", None, 7)


@pytest.mark.parametrize(
    ("prob", "per_node", "source"),
    [
        (0.999, 0.01, "cache"),
        (0.5, 0.01, "both"),
        (0.001, 9.0, "plain"),
    ],
)
def test_what_pays_is_allocated(prob: float, per_node: float, source: str) -> None:
    assert planned(drafter(prob=prob, per_node=per_node)).source is source


def test_what_contexts_take_follows_prompts_and_all_that_was_committed() -> None:
    """With each token of context a step takes a millisecond more, and more nodes pay."""
    made = drafter(prob=0.85, per_node=4.0, of_round=100.0, of_context=1000.0)

    def width(rid: str, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> int:
        made.start(rid, prompt)
        for output in outputs:
            made.extend(rid, output)
        [plan] = single_plans(made.plan([rid]))
        made.commit([rid], outcome_batch([VerifyOutcome(np.array([11], np.int32), 0, None)]))
        made.finish(rid, output_ids=None, keep=False)
        return plan.num_nodes

    short = width("short", REPEATS, [[3]])
    long_prompt = width("prompt", [*range(100, 160), *REPEATS], [[3]])
    long_output = width("output", REPEATS[:-2], [range(100, 160), [*REPEATS[-2:], 3]])
    assert short < long_prompt
    assert long_output == long_prompt


def test_all_tokens_of_a_request_are_counted() -> None:
    """Steps are priced by them: test_step_core.py compares that with the oracle."""
    made = drafter()
    made.start("text", [1, 2, 3])
    made.start("image", [], limits=MODEL_ONLY, num_prompt_tokens=500)
    counted = []
    for _ in range(2):
        counted.append(made.num_tokens("text") + made.num_tokens("image"))
        made.plan(["text", "image"])
        outcomes = [VerifyOutcome(np.array([7, 8], np.int32), 1), VerifyOutcome([9], 0)]
        made.commit(["text", "image"], outcome_batch(outcomes))
    made.extend("text", [1, 2, 3, 4], counts=False)
    assert counted == [503, 506]
    assert made.num_tokens("text") == 3 + 2 * 2 + 4


def test_a_cut_draft_tells_of_the_match_as_the_whole_one_does() -> None:
    part, whole = (
        planned(made).cache_draft for made in (drafter("both", verify_width=10), drafter("cache"))
    )
    assert part is not None
    assert whole is not None
    assert part.num_tokens < whole.num_tokens
    assert (part.match_len, part.source) == (whole.match_len, whole.source)


@pytest.mark.parametrize("policy", ["allocate", "both"])
def test_a_model_only_request_verifies_the_whole_model_tree(policy: Policy) -> None:
    made = drafter(policy, prob=0.999)
    made.start("r", REPEATS, limits=MODEL_ONLY)
    made.extend("r", [3])
    for _ in range(3):
        [plan] = single_plans(made.plan(["r"]))
        assert (plan.source, plan.cache_draft) == ("model", None)
        assert (plan.num_model_nodes, plan.num_model_steps) == (7, 3)
        made.commit(["r"], outcome_batch([VerifyOutcome([4], 0)]))


def figures(made: HybridDrafter, rids: Sequence[str]) -> str:
    """All that is learned."""
    stats = [made.stats(rid) for rid in rids]
    return repr((stats, made.calibration(), made.model_figures()))


def outcomes_of(plans: Sequence[DraftPlan], random: np.random.Generator) -> list[VerifyOutcome]:
    """The model drafter has one token right, the cache some; the text goes on otherwise."""
    outcomes = []
    for plan in plans:
        draft = drafted(plan)[: random.integers(0, 4)]
        of_model = 1 if plan.num_model_nodes else 0
        is_both = plan.source == "both"
        tokens = [*(draft or [88] * of_model), 99]
        outcomes.append(VerifyOutcome(tokens, len(tokens) - 1, of_model if is_both else None))
    return outcomes


def test_a_batch_may_be_committed_in_parts() -> None:
    rids, spaced = ["a", "b", "c", "d"], ["a", "c", "d"]
    whole, parts = drafter(prob=0.5), drafter(prob=0.5)
    for made in (whole, parts):
        for rid in rids:
            made.start(rid, REPEATS, limits=MODEL_ONLY if rid == "b" else None)
            made.extend(rid, [3])
    random, num_learned = np.random.default_rng(0), 0
    for cycle in range(30):
        plans = single_plans(whole.plan(rids))
        assert parts.plan(rids).sources == [plan.source for plan in plans]
        outcomes = dict(zip(rids, outcomes_of(plans, random), strict=True))
        whole.commit(rids, outcome_batch(list(outcomes.values())))
        for part in (["a"], ["b"], ["c", "d"]) if cycle % 2 else (["a", "b"], ["c", "d"]):
            parts.commit(part, outcome_batch([outcomes[rid] for rid in part]))
        assert figures(parts, spaced) == figures(whole, spaced)
        num_learned = sum(f.num_verified for f in (whole.calibration() or {}).values())
        for made in (whole, parts):
            for rid in rids:
                made.extend(rid, [1, 2, 3])
    assert num_learned > 30


def test_a_request_that_is_gone_is_left_out_of_a_commit() -> None:
    whole, without = drafter(prob=0.5), drafter(prob=0.5)
    random = np.random.default_rng(0)
    for made in (whole, without):
        for rid in "abc":
            made.start(rid, REPEATS)
            made.extend(rid, [3])
    plans = single_plans(whole.plan("abc"))
    without.plan("abc")
    first, second, third = outcomes_of(plans, random)
    without.finish("a", output_ids=None, keep=False)
    without.commit("bc", outcome_batch([second, third]))
    whole.commit("bc", outcome_batch([second, third]))
    assert figures(without, "bc") == figures(whole, "bc")
    whole.commit("a", outcome_batch([first]))
    assert figures(without, "bc") != figures(whole, "bc")


def test_arrays_are_committed_as_outcomes_are() -> None:
    listed, in_arrays = drafter(prob=0.5), drafter(prob=0.5)
    random, rids = np.random.default_rng(1), ["a", "b"]
    for made in (listed, in_arrays):
        for rid in rids:
            made.start(rid, REPEATS)
            made.extend(rid, [3])
    for _ in range(20):
        plans = single_plans(listed.plan(rids))
        in_arrays.plan(rids)
        outcomes = outcomes_of(plans, random)
        listed.commit(rids, outcome_batch(outcomes))
        token_ids = np.full((2, 9), 7, np.int32)  # what stands behind a row's length does not count
        for row, outcome in zip(token_ids, outcomes, strict=True):
            row[: len(outcome.token_ids)] = outcome.token_ids
        num_accepted = np.array([o.num_accepted_drafts for o in outcomes], np.int32)
        of_model = [-1 if o.num_model_accepted is None else 1 for o in outcomes]
        in_arrays.commit(
            rids,
            VerifyOutcomes(token_ids, num_accepted + 1, num_accepted, np.array(of_model, np.int32)),
        )
        assert figures(in_arrays, rids) == figures(listed, rids)


def test_a_cycle_of_both_counts_for_both() -> None:
    made = drafter("both")
    planned(made)
    made.commit(["r"], outcome_batch([VerifyOutcome([4, 5, 99], 2, num_model_accepted=1)]))
    assert made.stats("r") == RequestStats({"both": 1}, {"both": 2}, num_target_tokens=2)


def test_both_drafts_are_learned_from_a_cycle_that_verified_both() -> None:
    made = drafter(prob=0.5)
    assert planned(made).source == "both"
    # The cache draft had two tokens right, the model drafter three.
    made.commit(["r"], outcome_batch([VerifyOutcome([4, 5, 99, 98], 3, num_model_accepted=3)]))
    of_model, of_cache = made.model_figures(), made.calibration()
    assert of_model is not None
    assert (of_model.num_verified, of_model.mean_accepted) == (1, 3)
    assert of_cache is not None
    [origin] = [figures for figures in of_cache.values() if figures.num_verified]
    assert (origin.num_verified, origin.mean_accepted) == (1, 2)


def test_where_it_is_not_known_what_the_model_drafter_had_right_nothing_is_learned_of_it() -> None:
    made = drafter(prob=0.5)
    assert planned(made).source == "both"
    made.commit(["r"], outcome_batch([VerifyOutcome([4, 5, 99], 2)]))
    figures = made.model_figures()
    assert figures is not None
    assert figures.num_verified == 0


def test_what_a_cut_draft_brings_is_compared_with_what_was_expected_of_its_part() -> None:
    made = drafter(prob=0.9, per_node=2.0)
    plan = planned(made)
    num = plan.cache_draft.num_tokens if plan.cache_draft else 0
    assert 0 < num < 8
    made.commit(["r"], outcome_batch([VerifyOutcome([*drafted(plan), 99], num)]))
    figures = made.calibration()
    assert figures is not None
    [origin] = [each for each in figures.values() if each.num_verified]
    assert origin.mean_predicted == pytest.approx(sum(0.9**j for j in range(1, num + 1)), abs=1e-3)


# What follows 1, 2, 3 differs: 4, 5, 6 the first time, 7, 8, 9 the second.
DIFFERS = [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 1, 2]


def branching(made: HybridDrafter) -> DraftPlan:
    made.start("r", DIFFERS)
    made.extend("r", [3])
    [plan] = single_plans(made.plan(["r"]))
    return plan


def chain_and_branch(plan: DraftPlan) -> tuple[list[int], list[int]]:
    """The tokens up to where each of the two ends."""
    draft = plan.cache_draft
    assert draft is not None
    assert draft.parents is not None
    token_ids, parents = draft.token_ids.tolist(), draft.parents.tolist()
    first = [node for node, parent in enumerate(parents) if parent < 0]
    assert len(first) == 2
    paths = []
    for node in first:
        path = [node]
        while path[-1] in parents:
            path.append(parents.index(path[-1]))
        paths.append([token_ids[place] for place in path])
    return paths[0], paths[1]


def test_a_cache_draft_branches_where_the_votes_differ() -> None:
    chain, branch = chain_and_branch(branching(drafter(prob=0.5)))
    assert {chain[0], branch[0]} == {4, 7}
    for without in (
        drafter(prob=0.5, branches=False),
        drafter(prob=0.5, verifies_trees=False),
        drafter(prob=0.999),  # nothing is left for a branch
    ):
        plan = branching(without)
        assert plan.cache_draft is None or plan.cache_draft.parents is None


def test_what_a_branch_brings_says_of_the_chain_that_it_was_wrong() -> None:
    made = drafter(prob=0.5)
    _, branch = chain_and_branch(branching(made))
    made.commit(["r"], outcome_batch([VerifyOutcome([*branch[:2], 99], 2, num_model_accepted=0)]))
    figures = made.calibration()
    assert figures is not None
    [origin] = [each for each in figures.values() if each.num_verified]
    assert (origin.num_verified, origin.mean_accepted) == (1, 0)
    stats = made.stats("r")
    assert stats.num_accepted_drafts.get("both", 0) + stats.num_accepted_drafts.get("cache", 0) == 2


def test_the_allocator_sees_how_far_every_request_came() -> None:
    made, pace = drafter(), Pace()
    for slot, rid in enumerate("ab"):
        planned(made, rid)
        pace.start(slot)
    made.commit("ab", outcome_batch([VerifyOutcome([4, 5, 99], 2), VerifyOutcome([99], 0)]))
    slots, wanted, found = np.arange(2, dtype=np.int32), np.empty(2), np.empty(2)
    pace.see_tokens(slots, np.array([3, 1], np.int32))
    pace.write_token_values(slots, wanted)
    assert made._allocator is not None
    made._allocator.native.pace.write_token_values(slots, found)
    assert found.tolist() == wanted.tolist()


def test_of_a_longer_draft_as_many_tokens_are_weighed_as_the_predictor_knows() -> None:
    repeats = list(range(1, 150))
    made = drafter(
        *("allocate",),
        prob=0.999,
        verify_width=128,
        widths=(1, 128),
        cache_mode="paper",
        max_draft_tokens=128,
        max_depth=256,
    )
    made.start("r", [*repeats, *repeats[:70]])
    made.extend("r", [71])
    [plan] = single_plans(made.plan(["r"]))
    assert drafted(plan) == repeats[71 : 71 + MAX_DRAFT_LEN]


def test_a_cycle_that_verified_a_branch_alone_tells_of_the_chains_first_token() -> None:
    # The predictor thinks so little of the chain that what the votes say beside it comes first.
    made = drafter(prob=0.02, per_node=0.0)
    made.start("r", DIFFERS)
    made.extend("r", [3])
    proposals = made.propose(["r"])
    assert isinstance(proposals.predicted, TreePrediction)
    proposals.predicted.trees.num_nodes[0] = 1
    [plan] = single_plans(made.choose(["r"], proposals))
    chain = int(proposals.drafts.token_ids[0, 0])
    assert drafted(plan) == [{4: 7, 7: 4}[chain]]
    made.commit(["r"], outcome_batch([VerifyOutcome([chain], 0, 0)]))
    figures = made.calibration()
    assert figures is not None
    [origin] = [each for each in figures.values() if each.num_verified]
    assert (origin.num_verified, origin.mean_accepted) == (1, 1)
    assert origin.mean_predicted == pytest.approx(0.02, abs=1e-3)


def test_no_branch_makes_a_draft_longer_than_it_may_be() -> None:
    made = drafter(prob=0.6, per_node=0.0, max_draft_tokens=3)
    plan = branching(made)
    assert plan.cache_draft is not None
    assert plan.cache_draft.num_tokens <= 3


def test_drafts_are_no_longer_than_what_a_step_of_so_many_can_verify() -> None:
    made = drafter(prob=0.999, per_node=0.0, of_round=9.0, base_width=8)
    rids = ["a", "b", "c"]
    for rid in rids:
        planned(made, rid)
    for num in (3, 1, 2, 3):
        proposals = made.propose(rids[:num])
        longest = 7 if num > 2 else WIDTHS[-1] - 1
        assert proposals.drafts.num_nodes[:num].tolist() == [longest] * num
        plans = single_plans(made.choose(rids[:num], proposals))
        assert [len(drafted(plan)) for plan in plans] == [longest] * num


def test_a_plan_of_a_batch_is_one_allocation() -> None:
    made = drafter(prob=0.999)
    planned(made, "sure")
    made.commit(["sure"], outcome_batch([VerifyOutcome([4], 0)]))
    made.start("new", [50, 60, 70])
    sure, new = single_plans(made.plan(["sure", "new"]))
    assert sure.source == "cache"
    assert (new.source, new.cache_draft) == ("model", None)


def test_allocation_needs_an_allocator_and_a_distribution(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the allocate policy needs an allocator"):
        HybridDrafter(
            HvdConfig(policy="allocate"),
            cache=SuffixCache.as_in_paper(),
            predictor=constant_survival(0.5),
            token_classes=CLASSES,
            num_model_steps=3,
            num_model_nodes=7,
            verify_width=16,
        )
    linear({}).save(tmp_path / "bare.safetensors")
    with pytest.raises(
        ValueError, match=r"needs a predictor of kind survival, .* of kind mlp: use"
    ):
        drafter().read_predictor(tmp_path / "bare.safetensors")


def test_a_predictor_that_is_off_leaves_the_votes_to_decide_and_is_still_judged() -> None:
    # It promises much where next to nothing is accepted. The votes are less sure of a single match.
    made, other = drafter(prob=0.95, per_node=0.3), drafter(prob=0.95, per_node=0.3)
    changes = []
    for number in range(900):
        text = np.random.default_rng(number).integers(0, 10_000, 8).tolist()
        made.start(number, [*text, *text[:3]])
        made.extend(number, [text[3]])
        [plan] = single_plans(made.plan([number]))
        made.commit(
            [number],
            outcome_batch([VerifyOutcome([77], 0, 0 if plan.num_model_nodes else None)]),
        )
        made.finish(number, output_ids=None, keep=False)
        figures = made.calibration()
        assert figures is not None
        if not changes or figures["prompt"].is_fallback is not changes[-1]:
            changes.append(figures["prompt"].is_fallback)
    assert changes == [False, True]  # and it is not taken for right again
    trusting, heeding_votes = planned(other), planned(made)
    assert 0 < len(drafted(heeding_votes)) < len(drafted(trusting))


def test_a_finished_request_leaves_its_slot_to_the_next() -> None:
    made = drafter()
    for _ in range(3):
        made.start("r", REPEATS)
        request = made._requests["r"]
        assert (request.of_cache, request.of_rest) == (0, 0)
        made.finish("r", output_ids=None, keep=False)


def test_drafts_are_as_long_as_is_asked_for_at_most() -> None:
    made = drafter()
    made.start("r", REPEATS)
    made.extend("r", [3])
    lengths = [made.propose(["r"], most).drafts.num_nodes.tolist() for most in (3, 15, 40)]
    assert lengths == [[3], [15], [15]]


def test_of_tokens_that_nothing_is_known_of_none_is_drafted() -> None:
    made = drafter(prob=0.9999, per_node=0.0, verify_width=129, widths=(1, 129))
    text = list(range(200))
    made.start("r", [*text, *text[:5]])
    [plan] = single_plans(made.plan(["r"]))
    assert len(drafted(plan)) == 64


@pytest.mark.parametrize(("num_wrong", "cache_rate"), [(0, 0.0), (1, 1.0)])
def test_a_part_that_was_accepted_whole_is_left_out_of_the_history(
    num_wrong: int, cache_rate: float
) -> None:
    made = drafter(prob=0.9, per_node=2.0)
    part = drafted(planned(made))
    assert 1 < len(part) < 8
    right = part[: len(part) - num_wrong]
    made.commit(["r"], outcome_batch([VerifyOutcome([*right, 99], len(right))]))
    made.extend("r", [1, 2, 3])  # or there is no draft
    features = made.propose(["r"]).features
    assert features is not None
    assert features.features[0, FEATURE_NAMES.index("recent_cache_rate")] == cache_rate


def test_an_empty_batch_needs_nothing() -> None:
    made = drafter()
    assert len(made.plan([])) == 0
    made.commit([], outcome_batch([]))


def test_a_step_that_was_launched_without_drafts_is_planned_all_the_same() -> None:
    """What is known of a request is that of one whose cycle was planned and left without."""
    made, other = drafter(of_round=50), drafter(of_round=50)
    for of in (made, other):
        of.start("r", REPEATS)
        of.extend("r", [3])
    assert made.plan_launched(["r"])  # four to nine follow, which is worth a verification
    [plan] = single_plans(other.plan(["r"]))
    assert plan.source == "cache"
    made.commit(["r"], outcome_batch([VerifyOutcome([4], 0)]))
    other.commit(["r"], outcome_batch([VerifyOutcome([4], 0)]))
    assert made.stats("r").num_cycles["plain"] == 1
    assert made.stats("r").num_target_tokens == 2
    # The next is planned from the same text.
    [plan], [expected] = single_plans(made.plan(["r"])), single_plans(other.plan(["r"]))
    assert drafted(plan) == drafted(expected)
    assert drafted(plan)[:2] == [5, 6]


def test_a_step_that_nothing_could_have_drafted_wants_no_drafts() -> None:
    made = drafter(of_round=50)
    made.start("r", [1, 2, 3])
    assert not made.plan_launched(["r"])


def test_only_policies_that_leave_requests_without_drafts_run_ahead() -> None:
    made = drafter("both")
    made.start("r", REPEATS)
    with pytest.raises(AssertionError):
        made.plan_launched(["r"])
