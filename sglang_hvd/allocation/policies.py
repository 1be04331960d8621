"""The policies: which draft each request verifies in its next cycle.

Each function takes one entry per request of the batch and returns one DraftSource per request.
None stands for a request without a cache draft.
"""

from collections.abc import Sequence

from sglang_hvd.types import DraftSource


def by_payoff(payoffs: Sequence[float | None], threshold: float) -> list[DraftSource]:
    """The paper's gate (section 3.4): the cache draft when its predicted accepted length, in
    tokens without the bonus token, reaches the threshold, else the model drafter's draft."""
    return [_cache_from(threshold, payoff) for payoff in payoffs]


def by_odds(probs: Sequence[float | None]) -> list[DraftSource]:
    """The same gate where the distribution of the accepted length is known: the cache draft when
    it is at least as likely as not to reach the threshold.

    probs: probability of each request's cache draft that its accepted length reaches it.
    """
    return [_cache_from(0.5, prob) for prob in probs]


def by_comparison(
    payoffs: Sequence[float | None], model_payoffs: Sequence[float]
) -> list[DraftSource]:
    """The draft of which more tokens are expected to be accepted, the cache draft where both bring
    the same. It counts tokens, not time: a cycle that drafts with the model takes longer."""
    return [
        _cache_from(of_model, payoff)
        for payoff, of_model in zip(payoffs, model_payoffs, strict=True)
    ]


def by_frequency(scores: Sequence[float | None], threshold: float) -> list[DraftSource]:
    """The rule-based hybrid: the cache draft when its score reaches the threshold, else the
    model drafter's draft. ArcticInference's rule, which sets the threshold to the number of
    tokens the model drafter drafts (arctic_inference/vllm/model_runner.py, min_score)."""
    return [_cache_from(threshold, score) for score in scores]


def cache_only(has_draft: Sequence[bool]) -> list[DraftSource]:
    """SuffixDecoding: every cache draft; without one the target model decodes one token."""
    return [DraftSource.CACHE if has else DraftSource.PLAIN for has in has_draft]


def _cache_from(threshold: float, estimate: float | None) -> DraftSource:
    worth_verifying = estimate is not None and estimate >= threshold
    return DraftSource.CACHE if worth_verifying else DraftSource.MODEL
