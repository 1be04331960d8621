"""What a request's latest cycles say about its cache drafts."""

from collections import deque


class RequestHistory:
    """The latest cycles of one request: which verified a cache draft, and what it brought.

    Only cache drafts count for the accepted lengths, so that the features do not depend on how
    good the model drafter is (paper, section 3.3: "recent cache-draft behavior").
    """

    def __init__(self, window: int) -> None:
        # One entry per cycle: accepted tokens of the cache draft, None where none was verified.
        self._cycles: deque[int | None] = deque(maxlen=window)

    def record(self, num_accepted_cache_drafts: int | None) -> None:
        """Adds a cycle; None: it verified no cache draft."""
        self._cycles.append(num_accepted_cache_drafts)

    @property
    def cache_rate(self) -> float:
        """Share of the latest cycles that verified a cache draft; 0 before the first cycle."""
        return len(self._accepted()) / len(self._cycles) if self._cycles else 0.0

    @property
    def mean_accepted(self) -> float:
        """Mean accepted length of the cache drafts of the latest cycles; 0 without any."""
        accepted = self._accepted()
        return sum(accepted) / len(accepted) if accepted else 0.0

    @property
    def last_accepted(self) -> int:
        """Accepted length of the latest cache draft of the latest cycles; 0 without any."""
        accepted = self._accepted()
        return accepted[-1] if accepted else 0

    def _accepted(self) -> list[int]:
        return [accepted for accepted in self._cycles if accepted is not None]
