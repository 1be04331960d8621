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
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.payoff._native import ModelExpectations
from sglang_hvd.payoff.reliability import RunningReliability
from sglang_hvd.types import DraftBatch, TokenIds

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

# Before anything was seen. Eight steps then bring 1.9 tokens; the paper's three drafters have 3.2,
# 2.2 and 0.8 (appendix C).
_PRIOR_PROB = 2 / 3
_PRIOR_WEIGHT = 32.0  # tokens

# What a count keeps of itself with each further token: the probabilities are of the last two
# thousand or so.
_KEPT = 0.9995

# A request's ratio is (tokens + prior) / (expected tokens + prior), over its latest cycles.
_PRIOR_TOKENS = 16.0
_KEPT_OF_REQUEST = 0.98


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


class ModelPayoff:
    """start for a new request, then expect before each cycle and observe after it. Requests are
    known by slots: small numbers. Equal calls give equal results. Not thread-safe.

    num_steps: steps of the model drafter, the most tokens that can be accepted.
    """

    def __init__(self, num_steps: int) -> None:
        self._expected = ModelExpectations(
            num_steps, _PRIOR_PROB, _PRIOR_WEIGHT, _KEPT, _PRIOR_TOKENS, _KEPT_OF_REQUEST
        )
        self._num_verified = 0
        self._reliability = RunningReliability()

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

    def observe(
        self,
        slots: Int32,
        token_ids: Sequence[TokenIds | Sequence[int]],
        accepted_lens: Sequence[int | None],
    ) -> None:
        """Takes in what the cycles committed.

        token_ids: committed tokens.
        accepted_lens: accepted tokens of each request's model draft; None: it was not verified.
        """
        for slot, committed, accepted in zip(slots.tolist(), token_ids, accepted_lens, strict=True):
            if accepted is None:
                continue
            tokens = np.ascontiguousarray(committed, np.int32)
            expected = self._expected.observe(slot, tokens, accepted)
            self._num_verified += 1
            self._reliability.add(expected, accepted)

    def figures(self) -> ModelFigures:
        """How right the predictions are."""
        right, wrong, after, without = self._expected.probs()
        seen = self._reliability.means()
        return ModelFigures(
            num_verified=self._num_verified,
            mean_predicted=seen.mean_predicted,
            mean_accepted=seen.share,
            prob_if_right=right,
            prob_if_wrong=wrong,
            prob_after=after,
            prob_without=without,
        )
