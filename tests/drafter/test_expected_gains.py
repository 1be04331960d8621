"""A planner that is asked says what each choice was expected to gain, and decides the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_hvd.config import Policy
from sglang_hvd.drafter import HybridDrafter, TreePrediction
from sglang_hvd.types import SCORE, DraftPlans, ExpectedGains
from tests.drafter.test_cost_planner import NUM_STEPS, REPEATS, SIZES, drafter


def explained(made: HybridDrafter) -> tuple[DraftPlans, ExpectedGains]:
    """The plans of a request that repeats its prompt, and of one that repeats nothing."""
    for rid, prompt in (("r", REPEATS), ("nothing", [1, 0, 2])):
        made.start(rid, prompt)
        made.extend(rid, [3])
    plans = made.plan(["r", "nothing"], explains=[0, 1])
    assert plans.expected is not None
    return plans, plans.expected


def gain_of_both(
    predicted: TreePrediction, row: int, num_host: int, size: int, num_steps: int
) -> float:
    """P(either is right up to depth d) = H(d) + M(d) - H(d) M(d | the host's draft is right)."""
    trees, of_model = predicted.trees, predicted.model_acceptance
    total = 0.0
    for depth in range(1, trees.probs.shape[1] + 1):
        nodes = [n for n in range(num_host) if trees.depths[row, n] == depth]
        of_host = float(trees.probs[row, nodes].sum())
        total += of_host
        if depth <= num_steps:
            if_right = float(of_model.if_cache_right[row, size, depth - 1])
            alone = float(of_model.of_all[row, size, depth - 1])
            total += max(alone - min(of_host, 1.0) * if_right, 0.0)
    return total


@pytest.mark.parametrize(
    ("prob", "per_node", "of_round", "source"),
    [
        (0.999, 0.01, 0.5, "cache"),
        (0.5, 0.01, 0.5, "both"),
        (0.02, 1.0, 0.01, "model"),
        (0.001, 9.0, 9.0, "plain"),
    ],
)
def test_allocate_expects_what_its_allocator_was_given(
    prob: float, per_node: float, of_round: float, source: str
) -> None:
    made = drafter(prob=prob, per_node=per_node, of_round=of_round)
    plans, expected = explained(made)
    assert plans.sources[0] == source
    predicted = made.propose(["r", "nothing"]).predicted
    assert isinstance(predicted, TreePrediction)
    num_nodes = predicted.trees.num_nodes[:2].tolist()
    full = len(SIZES) - 1
    for row in range(2):
        sizes = {size: place for place, size in enumerate((*SIZES, 0))}
        model_steps = int(plans.model_steps[row]) if plans.num_model_nodes[row] else 0
        verified = (
            int(plans.drafts.num_nodes[row]),
            sizes[int(plans.model_sizes[row])] % len(SIZES),
            model_steps,
        )
        choices = {
            "cache": (num_nodes[row], full, 0),
            "model": (0, full, NUM_STEPS),
            "both": (num_nodes[row], full, NUM_STEPS),
            "verified": verified,
        }
        for name, choice in choices.items():
            found = float(getattr(expected, name)[row])
            if name in ("cache", "both") and not num_nodes[row]:
                assert np.isnan(found)
            else:
                assert found == pytest.approx(gain_of_both(predicted, row, *choice), abs=1e-5)
        if plans.num_model_nodes[row] and not plans.drafts.num_nodes[row]:
            assert expected.verified[row] == pytest.approx(plans.model_predicted[row], abs=1e-5)


@pytest.mark.parametrize("policy", ["payoff", "frequency", "cache", "model", "both"])
def test_a_rule_expects_what_it_compares(policy: Policy) -> None:
    made = drafter(policy, prob=0.9)
    plans, expected = explained(made)
    proposals = made.propose(["r", "nothing"])
    nothing = np.isnan([expected.cache, expected.model, expected.both, expected.verified])
    if policy == "payoff":
        predicted: Any = proposals.predicted
        assert expected.cache[0] == predicted.prediction.accepted_lens[0]
        assert expected.model.tolist() == predicted.model_lens.tolist()
        verified = [expected.cache if source == "cache" else expected.model
                    for source in plans.sources]  # fmt: skip
        assert expected.verified.tolist() == [of[row] for row, of in enumerate(verified)]
        assert nothing[:, 0].tolist() == [False, False, True, False]
    elif policy == "frequency":
        assert expected.cache[0] == proposals.drafts.matches[0, SCORE]
        assert nothing[:, 0].tolist() == [False, True, True, plans.sources[0] == "model"]
    else:
        assert nothing[:3].all()
        assert nothing[3].tolist() == [source != "plain" for source in plans.sources]
    assert np.isnan(expected.cache[1])


@pytest.mark.parametrize("policy", ["allocate", "payoff", "both"])
def test_an_explanation_changes_no_decision(policy: Policy) -> None:
    explained_plans, _ = explained(drafter(policy, prob=0.5))
    made = drafter(policy, prob=0.5)
    for rid, prompt in (("r", REPEATS), ("nothing", [1, 0, 2])):
        made.start(rid, prompt)
        made.extend(rid, [3])
    plans = made.plan(["r", "nothing"])
    assert plans.expected is None
    of_one = drafter(policy, prob=0.5)
    for rid, prompt in (("nothing", [1, 0, 2]), ("r", REPEATS)):
        of_one.start(rid, prompt)
        of_one.extend(rid, [3])
    second = of_one.plan(["nothing", "r"], explains=[1]).expected
    first = explained_plans.expected
    assert second is not None
    assert first is not None
    for name in ("cache", "model", "both", "verified"):
        np.testing.assert_equal(getattr(second, name)[1], getattr(first, name)[0])
    if policy == "allocate":
        assert np.isnan(second.verified[0])  # nothing is computed for it
    assert plans.sources == explained_plans.sources
    assert plans.num_nodes.tolist() == explained_plans.num_nodes.tolist()
    assert explained_plans.select([0]).expected is None
    assert DraftPlans.concatenate([explained_plans]).expected is None
