"""How many tokens of the model drafter's draft the target model will accept, predicted beforehand.

Both drafters find the same text easy, so how confident the cache is tells of the model drafter too.
Token by token: the model drafter has a token right, if it had those before it, with probability

    q_right    where the cache draft is right there,
    q_wrong    where the cache draft is wrong for the first time,
    q_after    behind that, or behind the end of the cache draft,
    q_without  where the cache proposes nothing.

With S(s) = P(the cache draft's first s tokens are right), which the payoff predictor knows,

    both(s)  = S(s) q_right^s
    alone(s) = alone(s - 1) q_after + (S(s - 1) - S(s)) q_right^(s - 1) q_wrong
    E[accepted] = sum over the steps s of both(s) + alone(s).

The four probabilities are taken from the cycles that verified the model drafter's draft: what they
committed shows which of its tokens were right, and which of the cache draft's. A gate sends few
confident cache drafts that way, and still q_right is seen, since many drafts that are not trusted
begin right. That it is the same at every confidence is an assumption. Each probability begins at
that of all tokens, so that a kind that is seldom seen does not keep what was assumed at the start.
Each request has a ratio to what was expected of it.

A smaller tree has fewer candidates for each token. Its tokens are right with odds lower by
e^-SIZE_EFFECT for each halving of the nodes: EAGLE's chain of 5 brings 3.2 tokens a cycle where its
tree of 26 nodes brings 3.9 (Li et al. 2024, EAGLE, ablation of tree attention), odds of 2.8 and 4.7
by five equal steps. A wrong token of a smaller tree is counted with weight e^(log odds difference),
so that the learned probabilities stay those of the full tree whatever size is verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.payoff._native import ModelExpectations
from sglang_hvd.payoff.reliability import Reliability
from sglang_hvd.types import DraftBatch, TokenIds

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

# In log odds for each doubling of the nodes.
SIZE_EFFECT = 0.21


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """How right the predictions for the model drafter's drafts are, and what they rest on.

    num_verified: its verified drafts.
    mean_predicted, mean_accepted: accepted length in tokens of the latest ones; None without any.
    prob_if_right, prob_if_wrong, prob_after, prob_without: probability of a token, see above.
    """

    num_verified: int
    mean_predicted: float | None
    mean_accepted: float | None
    prob_if_right: float
    prob_if_wrong: float
    prob_after: float
    prob_without: float


@dataclass(frozen=True, slots=True, eq=False)
class ModelReaches:
    """float32[num_requests, num_sizes, num_steps] each: probability that at least 1, 2, ... tokens
    of a draft of that size are accepted, and the same where the cache draft is right up to there.
    """

    of_all: Float32
    if_cache_right: Float32


@dataclass(frozen=True, slots=True, eq=False)
class ModelDrafts:
    """What is verified of the model drafter's drafts; unspecified where nothing is.

    num_nodes: int32[num_requests], their sizes, root not included; in few steps a draft may have
        fewer.
    num_steps: int32[num_requests], most tokens that can be accepted.
    expected: float32[num_requests], expected accepted tokens; not a number: those of the full size
        in all steps, as expect returned them.
    """

    num_nodes: Int32
    num_steps: Int32
    expected: Float32


class ModelPayoff:
    """start for a new request, then expect before each cycle and observe after it. Requests are
    known by slots: small numbers. Equal calls give equal results. Not thread-safe. The constants:
    native/expectations.hpp.

    num_steps: steps of the model drafter, the most tokens that can be accepted.
    sizes: nodes of its draft, root not included, rising; the last is the full size, which the
        probabilities are of. None: it drafts in one size only.
    """

    def __init__(self, num_steps: int, sizes: Sequence[int] | None = None) -> None:
        self._num_steps = num_steps
        self._sizes = np.array(sizes if sizes is not None else [num_steps], np.int32)
        self._expected = ModelExpectations(num_steps, int(self._sizes[-1]), SIZE_EFFECT)
        self._odds = np.array([self._expected.odds_of(size) for size in self._sizes.tolist()])

    def start(self, slot: int) -> None:
        """A new request has this slot."""
        self._expected.start(slot)

    def expect(self, slots: Int32, drafts: DraftBatch, survival: Float32 | None) -> Float32:
        """Expected accepted length of each request's model draft: float32[num_requests].

        drafts: what the cache proposes; row i belongs to slots[i].
        survival: float32[num_requests, MAX_DRAFT_LEN], probabilities that more than j of its tokens
            are accepted; None where they are not known: then q_without is taken for all tokens.
        """
        out = np.empty(len(slots), np.float32)
        self._expected.expect(slots, drafts.token_ids, drafts.num_nodes, survival, out)
        return out

    def expect_sizes(
        self, slots: Int32, drafts: DraftBatch, survival: Float32 | None
    ) -> ModelReaches:
        """How far each size of each request's model draft is expected to be accepted. Includes
        what expect does; takes what that takes."""
        self.expect(slots, drafts, survival)
        shape = (len(slots), len(self._sizes), self._num_steps)
        reaches = ModelReaches(np.empty(shape, np.float32), np.empty(shape, np.float32))
        self._expected.expect_sizes(
            slots,
            drafts.num_nodes,
            survival,
            self._sizes,
            self._odds,
            reaches.of_all,
            reaches.if_cache_right,
        )
        return reaches

    def observe(
        self,
        slots: Int32,
        token_ids: TokenIds,
        lengths: Int32,
        num_accepted: Int32,
        verified: ModelDrafts,
    ) -> None:
        """Takes in what the cycles committed.

        token_ids: int32[num_requests, width]; the first lengths[i] entries of row i were committed.
        num_accepted: int32[num_requests], accepted tokens of each request's model draft; below 0
            where it was not verified.

        Raises ValueError for a slot that was not started.
        """
        self._expected.observe(
            slots,
            token_ids,
            lengths,
            num_accepted,
            verified.num_nodes,
            verified.num_steps,
            verified.expected,
        )

    def figures(self) -> ModelFigures:
        """How right the predictions are."""
        right, wrong, after, without = self._expected.probs()
        num_verified, sums = self._expected.figures()
        seen = Reliability.of_sums(*sums)
        return ModelFigures(
            num_verified=num_verified,
            mean_predicted=seen.mean_predicted,
            mean_accepted=seen.share,
            prob_if_right=right,
            prob_if_wrong=wrong,
            prob_after=after,
            prob_without=without,
        )
