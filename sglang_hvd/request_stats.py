"""What the cycles of one request brought."""

from dataclasses import dataclass, replace

from sglang_hvd.types import DraftSource, VerifyOutcome


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a request's cycles verified and what that brought.

    Every committed token is counted once: as an accepted draft token, by what the cycle verified,
    or a token of the target itself (the bonus token of a cycle, and tokens committed outside the
    cycles). Where a stop or a limit cuts the last cycle off, committed tokens are more than
    generated ones.
    """

    num_cache_cycles: int = 0
    num_model_cycles: int = 0
    num_both_cycles: int = 0
    num_plain_cycles: int = 0
    num_cache_accepted_drafts: int = 0
    num_model_accepted_drafts: int = 0
    num_both_accepted_drafts: int = 0
    num_target_tokens: int = 0

    def after_cycle(self, source: DraftSource, outcome: VerifyOutcome) -> "RequestStats":
        """With one more cycle."""
        cycles = f"num_{source.value}_cycles"
        counts = {
            cycles: getattr(self, cycles) + 1,
            "num_target_tokens": self.num_target_tokens + outcome.num_target_tokens,
        }
        if source is not DraftSource.PLAIN:
            accepted = f"num_{source.value}_accepted_drafts"
            counts[accepted] = getattr(self, accepted) + outcome.num_accepted_drafts
        return replace(self, **counts)

    def after_tokens(self, num_tokens: int) -> "RequestStats":
        """With tokens committed outside the cycles."""
        return replace(self, num_target_tokens=self.num_target_tokens + num_tokens)
