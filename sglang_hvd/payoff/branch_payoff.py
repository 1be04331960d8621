"""How right the votes are beside the chain, learned from the branches that were verified.

A text that leaves the chain goes on as the other votes say less often than their shares: on the
held-out recordings .11, .22, .39 and .65 of the time where they say .14, .28, .52 and .83. Texts
differ: accepted tokens of branches over those expected with one share for all went from 0 to 3.8
among 17 files (docs/allocation.md).
"""

_FIRST_SHARE = 0.75
_MOST_SHARE = 1.0  # then nothing is left for a token without a vote
_PRIOR_TOKENS = 16.0

# What the sums keep of themselves with each further draft: the latest few hundred count.
_KEPT = 0.998


class BranchPayoff:
    """observe takes in what came of branches; share is what to expect of others."""

    def __init__(self) -> None:
        self._expected = self._came = 0.0

    @property
    def share(self) -> float:
        """How often a text that leaves the chain goes on as the other votes say, over their share
        of these votes."""
        found = (self._came + _PRIOR_TOKENS) / (self._expected + _PRIOR_TOKENS)
        return min(_FIRST_SHARE * found, _MOST_SHARE)

    def observe(self, expected: float, num_accepted: int) -> None:
        """Takes in a verified draft.

        expected: accepted tokens of its branches that were expected, by the share then.
        """
        of_first_share = expected * _FIRST_SHARE / self.share
        self._expected = _KEPT * self._expected + of_first_share
        self._came = _KEPT * self._came + num_accepted
