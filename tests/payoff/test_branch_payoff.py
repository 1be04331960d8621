import pytest

from sglang_hvd.payoff import BranchPayoff

FIRST = BranchPayoff().share


def test_it_follows_what_branches_bring() -> None:
    for every in (8, 10, 25, 5000):
        payoff = BranchPayoff()
        for number in range(3000):
            # Of branches that bring one token in ten drafts, were the first share right.
            payoff.observe(0.1 * payoff.share / FIRST, number % every == every - 1)
        assert payoff.share == pytest.approx(FIRST * 10 / every, abs=0.25 * FIRST)


def test_it_leaves_room_for_tokens_without_votes() -> None:
    payoff = BranchPayoff()
    for _ in range(3000):
        payoff.observe(0.1, 5)
    assert payoff.share == 1.0


def test_one_draft_changes_little() -> None:
    payoff = BranchPayoff()
    payoff.observe(1.0, 0)
    assert FIRST > payoff.share > 0.9 * FIRST
