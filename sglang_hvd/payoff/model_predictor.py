"""Predicts how many tokens of the model drafter's draft the target model accepts.

Both drafters find the same text easy, so the prediction for the cache draft also tells about the
model drafter. The model drafter has a token right, if it had those before it, with probability

    q_right    if the cache draft is right there,
    q_wrong    if the cache draft is wrong for the first time,
    q_after    after that, or after the end of the cache draft,
    q_without  if the cache proposes nothing.

With C(s) = P(the cache draft's first s tokens are right), which the acceptance predictor gives,

    both(s)  = C(s) q_right^s
    alone(s) = alone(s - 1) q_after + (C(s - 1) - C(s)) q_right^(s - 1) q_wrong
    E[accepted] = sum over the steps s of both(s) + alone(s).

The four probabilities are learned from the cycles that verified the model drafter's draft: the
committed tokens show which of its tokens were right, and which of the cache draft's. These cycles
rarely have confident cache drafts. They still show q_right, since many drafts that are not trusted
begin right; that q_right is the same for all drafts is an assumption. Each probability is drawn to
that of all tokens, so that a rare state does not keep its initial value. Each request has a ratio
of accepted to predicted tokens.

A smaller tree has fewer candidates for each token. The log odds of a token fall by SIZE_EFFECT for
each halving of the nodes: EAGLE's chain of 5 has 3.2 accepted tokens a cycle where its tree of 26
nodes has 3.9 (Li et al. 2024, EAGLE, ablation of tree attention), which are odds of 2.8 and 4.7 if
five steps are equal. A wrong token of a smaller tree counts with weight e^(log odds difference), so
the learned probabilities are those of the full tree whatever size is verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd import _native
from sglang_hvd.payoff.calibration import Reliability
from sglang_hvd.types import DraftBatch, TokenIds

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

# Change of a token's log odds for each doubling of the nodes.
SIZE_EFFECT = 0.21


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """How right the predictions for the model drafter's drafts are, and their parameters.

    num_verified: its verified drafts.
    mean_predicted, mean_accepted: accepted length in tokens of the latest ones, as predicted and as
        observed; None without any.
    prob_if_right, prob_if_wrong, prob_after, prob_without: the four probabilities of a token, see
        the module's description.
    """

    num_verified: int
    mean_predicted: float | None
    mean_accepted: float | None
    prob_if_right: float
    prob_if_wrong: float
    prob_after: float
    prob_without: float


@dataclass(frozen=True, slots=True, eq=False)
class ModelAcceptance:
    """float32[num_requests, num_sizes, num_steps] each: the probability that at least 1, 2, ...
    tokens of a draft of that size are accepted, and the same if the cache draft is right so far.
    """

    of_all: Float32
    if_cache_right: Float32


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedModelDrafts:
    """The model drafter's drafts that are verified; unspecified for requests without one.

    num_nodes: int32[num_requests], their sizes, root not included; with few steps a draft may have
        fewer nodes.
    num_steps: int32[num_requests], max tokens that can be accepted.
    predicted: float32[num_requests], how many tokens are predicted to be accepted. NaN: the full
        size in all steps, and the prediction that predict returned counts.
    """

    num_nodes: Int32
    num_steps: Int32
    predicted: Float32


class ModelPredictor:
    """Call start for a new request, then predict before each cycle and observe after it. Slots are
    small numbers that stand for requests. Equal calls give equal results. Not thread-safe.
    native/model_predictor.hpp has the constants.

    num_steps: steps of the model drafter, which are the max tokens that can be accepted.
    sizes: nodes of its draft, root not included, rising. The last is the full size, for which the
        probabilities hold. None: it drafts in one size only.
    """

    def __init__(self, num_steps: int, sizes: Sequence[int] | None = None) -> None:
        self.num_steps = num_steps
        self.sizes = np.array(sizes if sizes is not None else [num_steps], np.int32)
        self.native = _native.ModelPredictor(num_steps, int(self.sizes[-1]), SIZE_EFFECT)
        self.odds = np.array([self.native.odds_of(size) for size in self.sizes.tolist()])

    def start(self, slot: int) -> None:
        """Assigns the slot to a new request."""
        self.native.start(slot)

    def predict(
        self, slots: Int32, drafts: DraftBatch, cache_acceptance: Float32 | None
    ) -> Float32:
        """Predicted accepted length of each request's model draft: float32[num_requests].

        drafts: what the cache proposes; row i belongs to slots[i].
        cache_acceptance: float32[num_requests, MAX_DRAFT_LEN], probability that more than j of its
            tokens are accepted. None if it is unknown: q_without then counts for all tokens.
        """
        out = np.empty(len(slots), np.float32)
        self.native.predict(slots, drafts, cache_acceptance, out)
        return out

    def predict_sizes(
        self, slots: Int32, drafts: DraftBatch, cache_acceptance: Float32 | None
    ) -> ModelAcceptance:
        """The acceptance of each size of each request's model draft. Takes the arguments of
        predict, and does all that predict does."""
        self.predict(slots, drafts, cache_acceptance)
        shape = (len(slots), len(self.sizes), self.num_steps)
        acceptance = ModelAcceptance(np.empty(shape, np.float32), np.empty(shape, np.float32))
        self.native.predict_sizes(
            slots,
            drafts,
            cache_acceptance,
            self.sizes,
            self.odds,
            acceptance.of_all,
            acceptance.if_cache_right,
        )
        return acceptance

    def observe(
        self,
        slots: Int32,
        token_ids: TokenIds,
        lengths: Int32,
        num_accepted: Int32,
        verified: VerifiedModelDrafts,
    ) -> None:
        """Learns from the committed tokens of cycles.

        token_ids: int32[num_requests, width]; the first lengths[i] entries of row i were committed.
        num_accepted: int32[num_requests], accepted tokens of each request's model draft; below 0 if
            it was not verified.

        Raises ValueError for a slot that was not started.
        """
        self.native.observe(
            slots,
            token_ids,
            lengths,
            num_accepted,
            verified.num_nodes,
            verified.num_steps,
            verified.predicted,
        )

    def figures(self) -> ModelFigures:
        """How right the predictions are."""
        right, wrong, after, without = self.native.probs()
        num_verified, sums = self.native.figures()
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
