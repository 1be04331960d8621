"""The drafter's bookkeeping: plans, counts, histories, and nothing left behind."""

import inspect
import math
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hvd.config import CacheMode, HvdConfig, Policy
from sglang_hvd.drafter import ChainPrediction, HybridDrafter
from sglang_hvd.payoff import FEATURE_NAMES, POSITION_FEATURES, DraftFeatures, TokenClasses
from sglang_hvd.replay.core.single_cycles import (
    DraftPlan,
    VerifyOutcome,
    outcome_batch,
    single_plans,
)
from sglang_hvd.request_stats import RequestStats
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import MODEL_ONLY, SOURCES, DraftLimits, DraftPlans, VerifyOutcomes
from tests.payoff.made_up import constant_survival, linear

CLASSES = TokenClasses.from_strings([chr(33 + token) for token in range(60)])
COLUMN = {name: index for index, name in enumerate(FEATURE_NAMES)}


def drafter(
    policy: Policy = "payoff",
    *,
    predicted: str = "draft_len",
    num_model_steps: int = 3,
    verify_width: int = 65,
    **config: float,
) -> HybridDrafter:
    settings = HvdConfig(**config).for_policy(policy)  # type: ignore[arg-type]
    return HybridDrafter(
        settings,
        cache=SuffixCache.as_in_paper(),
        predictor=linear({predicted: 1}) if settings.predicts else None,
        token_classes=CLASSES,
        num_model_steps=num_model_steps,
        num_model_nodes=num_model_steps,
        verify_width=verify_width,
    )


def drafted(plan: DraftPlan) -> list[int] | None:
    return None if plan.cache_draft is None else plan.cache_draft.token_ids.tolist()


def only_draft(plans: DraftPlans) -> list[int] | None:
    [plan] = single_plans(plans)
    return drafted(plan)


# 3 tokens match, so the cache draft is [4, 5, 6]. Each is half probable, since nothing follows the
# second of the two occurrences yet: score 1.5.
REPEATS = [0, 1, 2, 3, 4, 5, 6, 7, 1, 2]


def started(made: HybridDrafter, rid: object = "r") -> HybridDrafter:
    made.start(rid, REPEATS)
    made.extend(rid, [3])
    return made


@pytest.mark.parametrize(("threshold", "source"), [(3.0, "cache"), (3.1, "model")])
def test_payoff_policy_verifies_the_cache_draft_from_the_threshold_on(
    threshold: float, source: str
) -> None:
    [plan] = single_plans(started(drafter(threshold=threshold)).plan(["r"]))
    assert plan.source == source
    assert plan.predicted_len == 3.0
    assert drafted(plan) == ([4, 5, 6] if source == "cache" else None)


@pytest.mark.parametrize(
    ("prob", "threshold", "source"),
    # The draft has 3 tokens. All of them are accepted with probability prob ** 3.
    [(0.8, 3.0, "cache"), (0.79, 3.0, "model"), (0.79, 2.1, "model"), (0.79, 2.0, "cache")],
)
def test_with_a_distribution_the_draft_has_to_reach_the_threshold_more_likely_than_not(
    prob: float, threshold: float, source: str
) -> None:
    made = HybridDrafter(
        HvdConfig(threshold=threshold),
        cache=SuffixCache.as_in_paper(),
        predictor=constant_survival(prob),
        token_classes=CLASSES,
        num_model_steps=3,
        num_model_nodes=3,
        verify_width=65,
    )
    [plan] = single_plans(started(made).plan(["r"]))
    assert plan.source == source
    assert plan.predicted_len == pytest.approx(prob + prob**2 + prob**3)


@pytest.mark.parametrize(("of_model", "source"), [(1, "cache"), (3, "cache"), (4, "model")])
def test_without_a_threshold_the_better_draft_is_verified(of_model: int, source: str) -> None:
    made = HybridDrafter(
        HvdConfig(policy="payoff", calibrate=False),
        cache=SuffixCache.as_in_paper(),
        predictor=linear({"draft_len": 1}),  # 3 tokens
        token_classes=CLASSES,
        num_model_steps=4,
        num_model_nodes=3,
        verify_width=65,
    )
    for number in range(300):  # without a cache draft
        made.start(number, [number % 50])
        [plan] = single_plans(made.plan([number]))
        assert plan.source == "model"
        committed = [50 + token for token in range(of_model + 1)]
        made.commit([number], outcome_batch([VerifyOutcome(committed, of_model)]))
        made.finish(number, output_ids=None, keep=False)
    figures = made.model_figures()
    assert figures is not None
    assert figures.mean_accepted == pytest.approx(of_model)
    [plan] = single_plans(started(made, "r").plan(["r"]))
    assert plan.source == source


def test_the_gate_compares_to_the_last_bit_and_does_not_depend_on_the_batch() -> None:
    def plans(payoff: float, num_requests: int) -> set[str]:
        made = HybridDrafter(
            HvdConfig(policy="payoff", calibrate=False),
            cache=SuffixCache.as_in_paper(),
            predictor=linear({}, bias=payoff),
            token_classes=CLASSES,
            num_model_steps=3,
            num_model_nodes=3,
            verify_width=65,
        )
        rids = list(range(num_requests))
        for rid in rids:
            started(made, rid)
        return {plan.source for plan in single_plans(made.plan(rids))}

    prob = 0.9  # before anything was seen
    of_model = np.float32(prob + prob * prob + prob * prob * prob)
    for num_requests in (1, 2, 33):
        assert plans(float(of_model), num_requests) == {"cache"}
        below = float(np.nextafter(of_model, np.float32(0)))
        assert plans(below, num_requests) == {"model"}


def test_a_confident_cache_raises_what_is_expected_of_the_model_drafter() -> None:
    made = HybridDrafter(
        HvdConfig(threshold=99),  # the model drafter always drafts
        cache=SuffixCache.as_in_paper(),
        predictor=constant_survival(0.9),
        token_classes=CLASSES,
        num_model_steps=3,
        num_model_nodes=3,
        verify_width=65,
    )
    for number in range(400):  # 3 tokens where the cache is right, none where it is wrong
        started(made, number)
        made.plan([number])
        outcome = VerifyOutcome([4, 5, 6, 7], 3) if number % 2 else VerifyOutcome([9], 0)
        made.commit([number], outcome_batch([outcome]))
        made.finish(number, output_ids=None, keep=False)
    for prob in (0.9, 0.2):
        made.use_predictor(constant_survival(prob))
        proposals = started(made, prob).propose([prob])
        assert isinstance(proposals.predicted, ChainPrediction)
        expected = prob + prob**2 + prob**3  # as far as the cache is right, so is the model
        assert proposals.predicted.model_lens.tolist() == [pytest.approx(expected, abs=0.3)]


def features_of_repeat(mode: CacheMode) -> DraftFeatures:
    """Of a prompt in which 3 to 7 followed 1 and 2, with which it ends."""
    config = HvdConfig(policy="cache", cache_mode=mode)
    made = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=None,
        token_classes=CLASSES,
        num_model_steps=3,
        num_model_nodes=3,
        verify_width=9,
    )
    made.start("r", [1, 2, 3, 4, 5, 6, 7, 1, 2])
    features = made.propose(["r"]).features
    assert features is not None
    return features


@pytest.mark.parametrize("mode", get_args(CacheMode))
def test_what_the_texts_know_of_a_draft_is_among_its_features(mode: CacheMode) -> None:
    features = features_of_repeat(mode)
    assert features.features[0, COLUMN["aligned"]] == pytest.approx(2 / 32)
    once = math.log(1.3 / 0.3) / 4
    for name, values in {
        "logit_follows": [once, once],
        "log_token_age": [math.log(7) / 10, math.log(6) / 10],
    }.items():
        got = features.positions[0, POSITION_FEATURES.index(name), :2]
        assert got.tolist() == pytest.approx(values, abs=1e-6), name


def test_the_votes_are_a_second_opinion_in_the_papers_mode() -> None:
    opinions = {}
    for mode in get_args(CacheMode):
        # The paper's draft has 2 tokens, since 2 match; the votes go on.
        [row] = features_of_repeat(mode).features
        opinions[mode] = [
            float(row[COLUMN[name]]) for name in ("draft_len", "score", "votes_score")
        ]
    assert [opinions[mode][0] for mode in ("votes", "paper")] == [8, 2]
    assert opinions["votes"][1] == opinions["votes"][2] == opinions["paper"][2]
    assert opinions["paper"][1] != opinions["paper"][2]


def test_payoff_policy_without_a_cache_draft_predicts_nothing() -> None:
    made = drafter()
    made.start("r", [1, 2, 3])
    [plan] = single_plans(made.plan(["r"]))
    assert (plan.source, plan.cache_draft, plan.predicted_len) == ("model", None, None)


@pytest.mark.parametrize(
    ("num_model_steps", "frequency_threshold", "source"),
    [(1, None, "cache"), (2, None, "model"), (4, 1.5, "cache"), (1, 1.6, "model")],
)
def test_frequency_policy_compares_the_score_with_the_model_steps_or_its_own_threshold(
    num_model_steps: int, frequency_threshold: float | None, source: str
) -> None:
    config = {} if frequency_threshold is None else {"frequency_threshold": frequency_threshold}
    made = started(drafter("frequency", num_model_steps=num_model_steps, **config))
    [plan] = single_plans(made.plan(["r"]))
    assert plan.source == source


def test_cache_policy_takes_a_plain_step_without_a_draft() -> None:
    made = started(drafter("cache"))
    made.start("s", [1, 2, 3])
    with_draft, without = single_plans(made.plan(["r", "s"]))
    assert (with_draft.source, drafted(with_draft)) == ("cache", [4, 5, 6])
    assert (without.source, without.cache_draft) == ("plain", None)


def test_model_policy_proposes_nothing() -> None:
    [plan] = single_plans(started(drafter("model")).plan(["r"]))
    assert (plan.source, plan.cache_draft, plan.predicted_len) == ("model", None, None)


def test_no_cache_draft_is_longer_than_one_verification_takes() -> None:
    [plan] = single_plans(started(drafter("cache", verify_width=3)).plan(["r"]))
    assert drafted(plan) == [4, 5]


def test_where_a_verification_has_room_for_the_root_alone_nothing_is_verified() -> None:
    made = started(drafter("cache", verify_width=1))
    [plan] = single_plans(made.choose(["r"], made.propose(["r"], 5)))
    assert (plan.source, plan.cache_draft) == ("plain", None)


@pytest.mark.parametrize("rids", [[], ["r"]])
def test_each_request_that_is_committed_needs_its_outcome(rids: list[str]) -> None:
    made = started(drafter("cache"))
    made.plan(["r"])
    with pytest.raises(ValueError, match="each needs one"):
        made.commit(rids, outcome_batch([VerifyOutcome([4], 0)] * (len(rids) + 1)))
    made.commit(["r"], outcome_batch([VerifyOutcome([4], 0)]))


def test_requests_of_one_batch_choose_on_their_own() -> None:
    made = started(drafter(threshold=3.0))
    made.start("short", [1, 2, 3, 9, 1])
    made.start("none", [1])
    sources = made.plan(["none", "r", "short"]).sources
    assert sources == ["model", "cache", "model"]


def test_a_plan_does_not_depend_on_the_batch() -> None:
    made = drafter(threshold=2.0)
    for rid in range(12):
        made.start(rid, [*REPEATS[rid % 4 :], *REPEATS[: rid % 7]])
    together = single_plans(made.plan(range(12)))
    for rid, plan in enumerate(together):
        [alone] = single_plans(made.plan([rid]))
        assert (alone.source, alone.predicted_len) == (plan.source, plan.predicted_len)
        assert drafted(alone) == drafted(plan)


def test_generated_tokens_and_history_reach_the_features() -> None:
    made = started(drafter("cache"))
    made.plan(["r"])
    made.commit(["r"], outcome_batch([VerifyOutcome([4, 5, 9], 2)]))
    made.extend("r", [1, 2])
    features = made.propose(["r"]).features
    assert features is not None
    [row] = features.features
    assert row[COLUMN["log_prompt_len"]] == pytest.approx(np.log1p(len(REPEATS)))
    assert row[COLUMN["log_generated_len"]] == pytest.approx(np.log1p(6))
    assert row[COLUMN["recent_cache_rate"]] == 1
    assert row[COLUMN["recent_last_accepted"]] == 2


def test_a_cycle_counts_for_the_source_planned_last() -> None:
    made = drafter(threshold=3.0)
    made.start("r", REPEATS)
    [first] = single_plans(made.plan(["r"]))  # 2 tokens match: not worth it
    made.extend("r", [3])
    [second] = single_plans(made.plan(["r"]))
    assert (first.source, second.source) == ("model", "cache")
    made.commit(["r"], outcome_batch([VerifyOutcome([4, 5, 6, 8], 3)]))
    assert made.stats("r") == RequestStats({"cache": 1}, {"cache": 3}, num_target_tokens=2)


def test_every_source_has_its_own_counts() -> None:
    made = drafter("cache")
    made.start("r", [1, 2, 3])
    made.plan(["r"])
    made.commit(["r"], outcome_batch([VerifyOutcome([1], 0)]))
    made.plan(["r"])
    made.commit(["r"], outcome_batch([VerifyOutcome([2, 3], 2)]))
    assert made.finish("r", output_ids=None, keep=False) == RequestStats(
        {"cache": 1, "plain": 1}, {"cache": 2}, num_target_tokens=1
    )


def test_the_counts_of_all_are_those_of_ended_and_active_requests() -> None:
    made = drafter("cache")
    ended = RequestStats()
    for rid in ("a", "b", "c"):
        made.start(rid, [1, 2, 3])
        made.extend(rid, [1])
        made.plan([rid])
        made.commit([rid], outcome_batch([VerifyOutcome([2, 3], 1)]))
        if rid != "c":
            ended += made.finish(rid, output_ids=None, keep=False)
    made.flush()
    assert made.stats_of_all() == ended + made.stats("c")
    assert made.stats_of_all().num_accepted_drafts == {"cache": 3}


def test_a_cycle_must_be_planned_before_it_is_committed() -> None:
    made = started(drafter())
    made.plan(["r"])
    made.commit(["r"], outcome_batch([VerifyOutcome([9], 0)]))
    with pytest.raises(AssertionError, match="planned before"):
        made.commit(["r"], outcome_batch([VerifyOutcome([9], 0)]))


def test_a_bad_commit_changes_nothing() -> None:
    made = started(drafter("cache"))
    made.start("s", [1])
    made.plan(["r", "s"])
    before = made.stats("r")
    with pytest.raises(ValueError, match="must not be negative"):
        made.commit(["r", "s"], outcome_batch([VerifyOutcome([4], 0), VerifyOutcome([-1], 0)]))
    with pytest.raises(KeyError):
        made.commit(["r", "t"], outcome_batch([VerifyOutcome([4], 0), VerifyOutcome([1], 0)]))
    assert made.stats("r") == before
    made.commit(["r", "s"], outcome_batch([VerifyOutcome([4], 0), VerifyOutcome([1], 0)]))


@pytest.mark.parametrize(
    ("lengths", "num_accepted", "message"),
    [
        ([1, 2], [0, 0], "one bonus token, got 2 tokens with 0 accepted drafts"),
        ([1, 2], [0, 3], "got 2 tokens with 3 accepted"),
        ([0, 2], [-1, 1], "got 0 tokens with -1 accepted"),
        ([1], [0], "outcomes of 1"),
    ],
)
def test_outcomes_that_disagree_change_nothing(
    lengths: list[int], num_accepted: list[int], message: str
) -> None:
    made = started(drafter("cache"))
    made.start("s", [1])
    made.plan(["r", "s"])
    before = made.stats("r"), made.num_tokens("r"), made.cache_stats()
    arrays = (np.array(values, np.int32) for values in (lengths, num_accepted, [-1, -1]))
    with pytest.raises(ValueError, match=message):
        made.commit(["r", "s"], VerifyOutcomes(np.zeros((2, 4), np.int32), *arrays))
    assert before == (made.stats("r"), made.num_tokens("r"), made.cache_stats())


def test_outcomes_of_another_length_or_type_are_refused() -> None:
    made = started(drafter("cache"))
    made.plan(["r"])
    one: Any = np.ones(1, np.int32)
    with pytest.raises(ValueError, match="one row and one length"):
        made.commit(["r"], VerifyOutcomes(np.zeros((1, 4), np.int32), one, one[:0], one))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        made.commit(["r"], VerifyOutcomes(np.zeros((1, 4), np.int32), one, one.astype(int), one))


def test_a_finished_request_serves_the_next_one_until_flush() -> None:
    made = drafter("cache")
    made.start("first", [9])
    made.extend("first", [1, 2, 3, 4])
    made.finish("first", output_ids=None, keep=True)
    made.start("second", [8, 1, 2])
    [before] = single_plans(made.plan(["second"]))
    made.flush()
    [after] = single_plans(made.plan(["second"]))
    assert before.cache_draft is not None
    assert before.cache_draft.source == "shared"
    assert (drafted(before), drafted(after)) == ([3, 4], None)


def test_what_drafts_had_right_counts_in_their_namespace_until_flush() -> None:
    made = drafter("payoff", threshold=9.0)

    def logits(rid: str) -> tuple[float, float]:
        proposals = made.propose([rid])
        assert proposals.features is not None
        made.choose([rid], proposals)
        row = proposals.features.features[0]
        own, of_all = COLUMN["own_logit_right_1"], COLUMN["logit_right_1"]
        return float(row[own]), float(row[of_all])

    for rid, namespace in (("first", "a"), ("second", "a"), ("other", "b")):
        made.start(rid, REPEATS, namespace=namespace)
        made.extend(rid, [3])
    unknown, known = logits("first"), logits("second")
    assert known == unknown
    assert unknown == pytest.approx((math.log(3), math.log(3)))
    made.choose(["first"], made.propose(["first"]))
    made.commit(["first"], outcome_batch([VerifyOutcome([9], 0)]))  # the draft has a 4 there
    known = logits("second")
    assert known[0] == unknown[0]
    # One wrong token after its predecessor, and after any.
    prob = 2 * (3 * 0.75 / 4) / 3
    assert known[1] == pytest.approx(math.log(prob / (1 - prob)), rel=1e-5)
    assert logits("other") == unknown
    made.flush()
    assert logits("second") == unknown


def test_a_model_only_request_says_nothing_about_the_drafts_of_others() -> None:
    made = drafter("payoff", threshold=9.0)

    def logit() -> float:
        proposals = made.propose(["other"])
        assert proposals.features is not None
        made.choose(["other"], proposals)
        return float(proposals.features.features[0, COLUMN["logit_right_1"]])

    made.start("other", REPEATS)
    made.extend("other", [3])
    unknown = logit()
    made.start("without", REPEATS, limits=MODEL_ONLY)
    made.extend("without", [3])
    made.plan(["without"])
    made.commit(["without"], outcome_batch([VerifyOutcome([9], 0)]))  # the draft has a 4 there
    assert logit() == unknown


def test_only_the_given_output_is_kept() -> None:
    made = drafter("cache")
    made.start("first", [9])
    made.extend("first", [1, 2, 3, 4])
    made.finish("first", output_ids=[1, 2, 3], keep=True)
    made.start("second", [8, 1, 2])
    assert only_draft(made.plan(["second"])) == [3]


@pytest.mark.parametrize("call", ["plan", "commit", "extend", "finish", "stats"])
def test_a_request_that_is_not_active_is_named(call: str) -> None:
    made = started(drafter("model"))
    made.finish("r", output_ids=None, keep=True)
    calls = {
        "plan": lambda: made.plan(["r"]),
        "commit": lambda: made.commit(["r"], outcome_batch([VerifyOutcome([1], 0)])),
        "extend": lambda: made.extend("r", [1]),
        "finish": lambda: made.finish("r", output_ids=None, keep=False),
        "stats": lambda: made.stats("r"),
    }
    with pytest.raises(KeyError, match="request 'r' is not active"):
        calls[call]()


def test_an_active_request_cannot_be_started_again() -> None:
    made = started(drafter())
    with pytest.raises(ValueError, match="already active"):
        made.start("r", [1])
    assert made.num_requests == 1


def test_a_bad_prompt_starts_nothing() -> None:
    made = drafter()
    with pytest.raises(ValueError, match="must be int32"):
        made.start("r", np.array([1, 2]))  # type: ignore[arg-type]
    assert made.num_requests == 0
    made.start("r", [1, 2])


def test_any_object_can_name_a_request() -> None:
    made, key = drafter(), object()
    started(made, key)
    [plan] = single_plans(made.plan([key]))
    assert plan.source == "cache"
    made.commit([key], outcome_batch([VerifyOutcome([4, 9], 1)]))
    assert made.finish(key, output_ids=None, keep=True).num_cycles["cache"] == 1


@pytest.mark.parametrize(("policy", "instead"), [("payoff", "model"), ("cache", "plain")])
def test_a_model_only_request_never_verifies_its_cache_draft(policy: Policy, instead: str) -> None:
    made = started(drafter(policy, threshold=0))
    made.start("s", REPEATS, limits=MODEL_ONLY)
    free, bound = single_plans(made.plan(["r", "s"]))
    assert (free.source, bound.source) == ("cache", instead)
    assert bound.cache_draft is None


NO_SOURCE, CACHE_ONLY = DraftLimits(0), DraftLimits(SOURCES.bit_of("cache"))


@pytest.mark.parametrize("policy", ["payoff", "frequency", "cache", "model", "both"])
def test_requests_with_limits_verify_what_they_ask_for_among_others(policy: Policy) -> None:
    settings = {"threshold": 9.0} if policy == "payoff" else {}
    made = drafter(policy, **settings)
    asked = {
        "free": None,
        "off": NO_SOURCE,
        "cache": CACHE_ONLY,
        "model": MODEL_ONLY,
        "two": DraftLimits(max_tokens=2),
        "none": DraftLimits(max_tokens=0),
        "one of the cache": DraftLimits(CACHE_ONLY.sources, max_tokens=1),
    }
    for rid, limits in asked.items():
        made.start(rid, REPEATS, limits=limits)
        made.extend(rid, [3])
    plans = dict(zip(asked, single_plans(made.plan(list(asked))), strict=True))
    alone = started(drafter(policy, **settings), "free")
    [expected] = single_plans(alone.plan(["free"]))
    assert (plans["free"].source, drafted(plans["free"])) == (expected.source, drafted(expected))
    assert plans["free"].num_model_nodes == expected.num_model_nodes
    assert {plans[rid].source for rid in ("off", "none")} == {"plain"}
    has_cache, has_model = policy != "model", policy != "cache"
    assert plans["cache"].source == ("cache" if has_cache else "plain")
    assert plans["model"].source == ("model" if has_model else "plain")
    assert drafted(plans["one of the cache"]) == ([4] if has_cache else None)
    two = plans["two"]
    assert two.num_model_nodes + len(drafted(two) or []) == 2


def test_the_drafter_tells_what_its_cache_holds() -> None:
    made = started(drafter())
    made.finish("r", output_ids=[1, 2], keep=True)
    started(made)
    held = made.cache_stats()
    assert (held.num_requests, held.num_request_tokens) == (1, len(REPEATS) + 1)
    assert (held.num_shared_requests, held.num_shared_tokens) == (1, 2)


def test_the_paper_modes_defaults_are_the_configurations() -> None:
    parameters = inspect.signature(SuffixCache.as_in_paper).parameters
    config = HvdConfig(cache_mode="paper")
    for name in ("max_depth", "max_draft_tokens", "max_spec_factor", "max_spec_offset"):
        assert parameters[name].default == getattr(config, name)
    assert parameters["min_token_prob"].default == config.lowest_token_prob


def test_payoff_policy_needs_predictor_and_token_classes() -> None:
    for predictor, classes in ((None, CLASSES), (linear({"score": 1}), None)):
        with pytest.raises(ValueError, match="needs a predictor and token classes"):
            HybridDrafter(
                HvdConfig(policy="payoff"),
                cache=SuffixCache.as_in_paper(),
                predictor=predictor,
                token_classes=classes,
                num_model_steps=3,
                num_model_nodes=3,
                verify_width=9,
            )


def test_a_policy_that_does_not_predict_takes_no_predictor() -> None:
    with pytest.raises(ValueError, match="the frequency policy uses no predictor"):
        HybridDrafter(
            HvdConfig(policy="frequency"),
            cache=SuffixCache.as_in_paper(),
            predictor=linear({"score": 1}),
            token_classes=CLASSES,
            num_model_steps=3,
            num_model_nodes=3,
            verify_width=9,
        )


def test_a_configuration_decides_how_the_cache_drafts() -> None:
    config = HvdConfig(policy="cache", cache_mode="paper", max_depth=3, shared_cache_tokens=0)
    made = HybridDrafter.from_config(
        config,
        token_strings=[],
        num_model_steps=3,
        num_model_nodes=3,
        verify_width=32,
        deterministic=True,
    )
    started(made)
    assert only_draft(made.plan(["r"])) == [4]
    made.finish("r", output_ids=None, keep=True)
    made.start("s", [9, 1, 2])
    assert only_draft(made.plan(["s"])) is None


def test_the_verify_width_leaves_room_for_the_root() -> None:
    made = HybridDrafter.from_config(
        HvdConfig(policy="cache"),
        token_strings=[],
        num_model_steps=3,
        num_model_nodes=2,
        verify_width=3,
        deterministic=False,
    )
    assert only_draft(started(made).plan(["r"])) == [4, 5]


def test_by_votes_a_draft_may_be_longer_than_its_match() -> None:
    drafts = {}
    for mode in get_args(CacheMode):
        config = HvdConfig(policy="cache", cache_mode=mode)
        made = HybridDrafter.from_config(
            config,
            token_strings=[],
            num_model_steps=3,
            num_model_nodes=3,
            verify_width=32,
            deterministic=True,
        )
        made.start("r", [1, 2, 3, 4, 5, 6, 7, 1, 2])
        drafts[mode] = only_draft(made.plan(["r"]))
    assert drafts["votes"][:5] == [3, 4, 5, 6, 7]
    assert drafts["paper"] == [3, 4]


def test_namespaces_do_not_see_each_others_outputs() -> None:
    made = drafter("cache")
    made.start("first", [1, 2], namespace="left")
    made.finish("first", output_ids=[5, 6, 7, 8, 9], keep=True)
    for rid, namespace in (("same", "left"), ("other", "right")):
        made.start(rid, [4, 5, 6, 7], namespace=namespace)
    same, other = single_plans(made.plan(["same", "other"]))
    assert drafted(same) == [8, 9]
    assert drafted(other) is None


def test_the_shipped_predictor_makes_a_drafter() -> None:
    for mode in get_args(CacheMode):
        made = HybridDrafter.from_config(
            HvdConfig(threshold=0, cache_mode=mode),
            token_strings=["a", "b"],
            num_model_steps=3,
            num_model_nodes=3,
            verify_width=32,
            deterministic=True,
        )
        [plan] = single_plans(started(made).plan(["r"]))
        assert plan.predicted_len is not None


@given(
    st.sampled_from(["payoff", "frequency", "cache", "model"]),
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 4), max_size=6), st.booleans()),
        max_size=40,
    ),
)
@settings(max_examples=60, deadline=None)
def test_counts_add_up_and_nothing_is_left(
    policy: Policy, events: list[tuple[int, list[int], bool]]
) -> None:
    made = drafter(policy, threshold=2.0)
    num_committed: dict[int, int] = {}
    num_cycles: dict[int, int] = {}
    for rid, token_ids, ends in events:
        if rid not in num_committed:
            made.start(rid, token_ids)
            num_committed[rid] = num_cycles[rid] = 0
        elif ends:
            stats = made.finish(rid, output_ids=None, keep=True)
            assert num_committed.pop(rid) == (
                stats.num_accepted_drafts.get("cache", 0)
                + stats.num_accepted_drafts.get("model", 0)
                + stats.num_target_tokens
            )
            assert num_cycles.pop(rid) == (
                stats.num_cycles.get("cache", 0)
                + stats.num_cycles.get("model", 0)
                + stats.num_cycles.get("plain", 0)
            )
        elif token_ids:
            running = sorted(num_committed)
            plans = single_plans(made.plan(running))
            outcomes = [
                VerifyOutcome(token_ids[:1], 0)
                if plan.source == "plain"
                else VerifyOutcome(token_ids, len(token_ids) - 1)
                for plan in plans
            ]
            made.commit(running, outcome_batch(outcomes))
            for each, outcome in zip(running, outcomes, strict=True):
                num_committed[each] += len(outcome.token_ids)
                num_cycles[each] += 1
        else:
            made.extend(rid, [1, 2])
            num_committed[rid] += 2
        assert made.num_requests == len(num_committed)
    for rid in list(num_committed):
        made.finish(rid, output_ids=None, keep=False)
    assert made.num_requests == 0
