"""How right the votes are beside the chain, learned from the branches that were verified.

A text that leaves the chain goes on as the other votes say less often than their shares: on the
held-out recordings .11, .22, .39 and .65 of the time where they say .14, .28, .52 and .83. Texts
differ: accepted tokens of branches over those expected with one share for all went from 0 to 3.8
among 17 files (docs/allocation.md).
"""

FIRST_BRANCH_SHARE = 0.75

# With a share of 1 nothing is left for a token without a vote. Branches that are thought too little
# of would not be verified any more, and nothing would correct it.
_LEAST_SHARE, _MOST_SHARE = 0.15, 1.0

# What the first share is worth, and what the sums keep of themselves with each further draft: the
# latest few hundred count.
_PRIOR_TOKENS = 16.0
_KEPT = 0.998


class BranchPayoff:
    """observe takes in what came of branches; share is what to expect of others."""

    def __init__(self) -> None:
        self._expected = self._came = 0.0

    @property
    def share(self) -> float:
        """How often a text that leaves the chain goes on as the other votes say, over their share
        of these votes."""
        expected = FIRST_BRANCH_SHARE * self._expected
        found = (self._came + _PRIOR_TOKENS) / (expected + _PRIOR_TOKENS)
        return min(max(FIRST_BRANCH_SHARE * found, _LEAST_SHARE), _MOST_SHARE)

    def observe(self, expected: float, num_accepted: int) -> None:
        """Takes in a verified draft.

        expected: accepted tokens of its branches, were the share 1.
        """
        self._expected = _KEPT * self._expected + expected
        self._came = _KEPT * self._came + num_accepted
