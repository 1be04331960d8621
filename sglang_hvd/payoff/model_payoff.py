"""How many tokens of the model drafter's draft the target model will accept, predicted beforehand.

Both drafters find the same text easy, so how confident the cache is tells of the model drafter too.
With R for "the cache draft's first token is right",

    E[accepted] = P(R) E[accepted | R] + (1 - P(R)) E[accepted | not R].

The payoff predictor knows P(R). The two means are taken from the cycles that verified the model
drafter's draft: their first committed token shows whether R held. A gate sends few confident cache
drafts that way, and still both means are filled, since R holds for many drafts that are not
trusted. That they are the same at every confidence is an assumption. Cycles without a cache draft
have a mean of their own. Each of the three begins at the mean of all cycles, so that a kind of
cycle that is seldom seen does not keep what was assumed at the start. Each request has a ratio to
what was expected of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.payoff._native import ModelExpectations
from sglang_hvd.payoff.reliability import KEPT, RunningReliability
from sglang_hvd.types import DraftBatch, TokenIds

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

# Before anything was seen: each step's token is accepted with this probability if those before it
# are. Eight steps then bring 1.9 tokens; the paper's three drafters have 3.2, 2.2 and 0.8
# (appendix C).
_PRIOR_PROB = 2 / 3
_PRIOR_CYCLES = 16.0

# A request's ratio is (tokens + prior) / (expected tokens + prior), over its latest cycles.
_PRIOR_TOKENS = 16.0
_KEPT_OF_REQUEST = 0.98

_WITHOUT_DRAFT, _WRONG, _RIGHT = range(3)
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """How right the predictions for the model drafter's drafts are, and what they rest on.

    num_verified: its verified drafts.
    mean_predicted, mean_accepted: accepted length in tokens of the latest ones; None without any.
    accepted_if_right, accepted_if_wrong: mean accepted length where the cache draft's first token
        was right, and where it was not.
    accepted_without_draft: the same where the cache proposed nothing.
    """

    num_verified: int
    mean_predicted: float | None
    mean_accepted: float | None
    accepted_if_right: float
    accepted_if_wrong: float
    accepted_without_draft: float


class ModelPayoff:
    """start for a new request, then expect before each cycle and observe after it. Requests are
    known by slots: small numbers. Equal calls give equal results. Not thread-safe.

    num_steps: steps of the model drafter, the most tokens that can be accepted.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._prior = sum(_PRIOR_PROB**step for step in range(1, num_steps + 1))
        self._accepted, self._cycles = [0.0] * 3, [0.0] * 3  # by kind of cycle
        self._num_verified = 0
        self._reliability = RunningReliability()
        self._expected = ModelExpectations()
        # By slot: accepted and expected tokens of the request's latest cycles.
        self._of_request: dict[int, tuple[float, float]] = {}

    def start(self, slot: int) -> None:
        """A new request has this slot."""
        self._expected.start(slot)
        self._of_request.pop(slot, None)

    def expect(self, slots: Int32, drafts: DraftBatch, survival: Float32 | None) -> Float32:
        """Expected accepted length of each request's model draft: float32[num_requests].

        drafts: what the cache proposes; row i belongs to slots[i].
        survival: float32[num_requests, MAX_DRAFT_LEN], probabilities that more than j of its tokens
            are accepted; None where they are not known: then the first one is as often as before.
        """
        out = np.empty(len(slots), np.float32)
        right, wrong = self._cycles[_RIGHT] + 1, self._cycles[_WRONG] + 1
        self._expected.expect(
            slots,
            drafts.token_ids,
            drafts.num_nodes,
            survival,
            self._means(),
            right / (right + wrong),
            self._num_steps,
            out,
        )
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
            first_id, of_all, expected = self._expected.at(slot)
            if first_id == _NO_TOKEN:
                kind = _WITHOUT_DRAFT
            else:
                kind = _RIGHT if committed[0] == first_id else _WRONG
            self._accepted[kind] = self._accepted[kind] * KEPT + accepted
            self._cycles[kind] = self._cycles[kind] * KEPT + 1
            self._num_verified += 1
            self._reliability.add(expected, accepted)
            came, foreseen = self._of_request.get(slot, (0.0, 0.0))
            came = came * _KEPT_OF_REQUEST + accepted
            foreseen = foreseen * _KEPT_OF_REQUEST + of_all
            self._of_request[slot] = came, foreseen
            self._expected.set_ratio(slot, (came + _PRIOR_TOKENS) / (foreseen + _PRIOR_TOKENS))

    def _means(self) -> tuple[float, float, float]:
        """Mean accepted length of each kind of cycle."""
        accepted, cycles = sum(self._accepted), sum(self._cycles)
        of_all = (accepted + self._prior * _PRIOR_CYCLES) / (cycles + _PRIOR_CYCLES)
        without, wrong, right = (
            (accepted + of_all * _PRIOR_CYCLES) / (cycles + _PRIOR_CYCLES)
            for accepted, cycles in zip(self._accepted, self._cycles, strict=True)
        )
        return without, wrong, right

    def figures(self) -> ModelFigures:
        """How right the predictions are."""
        means = self._means()
        seen = self._reliability.means()
        return ModelFigures(
            num_verified=self._num_verified,
            mean_predicted=seen.mean_predicted,
            mean_accepted=seen.share,
            accepted_if_right=means[_RIGHT],
            accepted_if_wrong=means[_WRONG],
            accepted_without_draft=means[_WITHOUT_DRAFT],
        )
