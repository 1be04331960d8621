"""What the cycles of one request brought."""

from dataclasses import astuple, dataclass

from sglang_hvd.types import DraftSource


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a request's cycles verified and what that brought.

    Every committed token is counted once: as an accepted draft token, by what the cycle verified,
    or a token of the target itself (the bonus token of a cycle, and tokens committed outside the
    cycles). Where a stop or a limit cuts the last cycle off, or a request is retracted while a step
    of it is on its way, committed tokens are more than generated ones.
    """

    num_cache_cycles: int = 0
    num_model_cycles: int = 0
    num_both_cycles: int = 0
    num_plain_cycles: int = 0
    num_cache_accepted_drafts: int = 0
    num_model_accepted_drafts: int = 0
    num_both_accepted_drafts: int = 0
    num_target_tokens: int = 0

    def __add__(self, other: "RequestStats") -> "RequestStats":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return RequestStats(*(one + another for one, another in pairs))


class RequestCounts:
    """Counts the cycles of a request as they come."""

    __slots__ = ("_num_accepted", "_num_cycles", "_num_target_tokens")

    def __init__(self) -> None:
        self._num_cycles = dict.fromkeys(DraftSource, 0)
        self._num_accepted = dict.fromkeys(DraftSource, 0)
        self._num_target_tokens = 0

    def add_cycle(self, source: DraftSource, num_accepted: int, num_tokens: int) -> None:
        """One more cycle, which committed so many tokens, accepted drafts among them."""
        self._num_cycles[source] += 1
        self._num_accepted[source] += num_accepted
        self._num_target_tokens += num_tokens - num_accepted

    def add_tokens(self, num_tokens: int) -> None:
        """Tokens committed outside the cycles."""
        self._num_target_tokens += num_tokens

    def stats(self) -> RequestStats:
        """So far."""
        cycles, accepted = self._num_cycles, self._num_accepted
        return RequestStats(
            num_cache_cycles=cycles[DraftSource.CACHE],
            num_model_cycles=cycles[DraftSource.MODEL],
            num_both_cycles=cycles[DraftSource.BOTH],
            num_plain_cycles=cycles[DraftSource.PLAIN],
            num_cache_accepted_drafts=accepted[DraftSource.CACHE],
            num_model_accepted_drafts=accepted[DraftSource.MODEL],
            num_both_accepted_drafts=accepted[DraftSource.BOTH],
            num_target_tokens=self._num_target_tokens,
        )
