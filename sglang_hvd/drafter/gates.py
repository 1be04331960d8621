"""Gates of the policies by rule: which requests verify their cache draft in their next cycle.

Each function takes numbers by request, not a number where there is no cache draft, and returns
bool[num_requests]. Under policies with a model drafter the other requests verify its draft.
"""

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


def by_payoff(payoffs: Float32, threshold: float) -> Bool:
    """The paper's gate (section 3.4): the cache draft when its predicted accepted length, in
    tokens without the bonus token, reaches the threshold."""
    return _reach(payoffs, threshold)


def by_odds(probs: Float32) -> Bool:
    """The same gate where the distribution of the accepted length is known: the cache draft when
    it is at least as likely as not to reach the threshold.

    probs: probability of each request's cache draft that its accepted length reaches it.
    """
    return _reach(probs, 0.5)


def by_comparison(payoffs: Float32, model_payoffs: Float32) -> Bool:
    """The draft of which more tokens are expected to be accepted, the cache draft where both bring
    the same. It counts tokens, not time: a cycle that drafts with the model takes longer."""
    reached: Bool = payoffs >= model_payoffs
    return reached


def by_frequency(scores: Float32, threshold: float) -> Bool:
    """The rule-based hybrid: the cache draft when its score reaches the threshold.
    ArcticInference's rule, which sets the threshold to the number of tokens the model drafter
    drafts (arctic_inference/vllm/model_runner.py, min_score)."""
    return _reach(scores, threshold)


def _reach(estimates: Float32, threshold: float) -> Bool:
    # As numbers of its own precision the threshold would be rounded.
    reached: Bool = estimates.astype(np.float64) >= threshold
    return reached
