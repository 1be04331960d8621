import pytest

from sglang_hvd.payoff import FIRST_BRANCH_SHARE, BranchPayoff


def after(num_drafts: int, expected: float, every: int) -> float:
    """The share after drafts of which each so many-th had a token of a branch accepted."""
    payoff = BranchPayoff()
    for number in range(num_drafts):
        payoff.observe(expected, number % every == every - 1)
    return payoff.share


@pytest.mark.parametrize(("every", "share"), [(2, 0.5), (3, 1 / 3), (100, 0.15), (1, 1.0)])
def test_it_becomes_what_branches_bring(every: int, share: float) -> None:
    """Within bounds; what it begins at counts for 16 tokens in the latest five hundred."""
    assert after(3000, 1.0, every) == pytest.approx(share, abs=0.02)


def test_branches_that_bring_more_than_the_votes_say_leave_room_for_tokens_without_any() -> None:
    assert after(3000, 0.1, 1) == 1.0


def test_it_begins_at_the_share_of_the_recordings_and_moves_slowly() -> None:
    assert BranchPayoff().share == FIRST_BRANCH_SHARE
    assert after(1, 1.0, 2) == pytest.approx(FIRST_BRANCH_SHARE * 16 / 16.75)
