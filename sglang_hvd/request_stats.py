"""Counts of one request's cycles, by the draft sources that the cycles verified."""

from collections import Counter
from dataclasses import dataclass, field

from sglang_hvd.types import SOURCES


@dataclass(slots=True)
class RequestStats:
    """What a request's cycles verified and what was accepted.

    Every committed token is counted once: as an accepted draft token, by what the cycle verified,
    or as a token of the target itself (the bonus token of a cycle, and tokens committed outside the
    cycles). There can be more committed tokens than generated ones: a stop or a limit may cut off
    the last cycle, or a request may be retracted while one of its steps is still running.

    num_cycles, num_accepted_drafts: by label of the verified sources (SourceTable); labels whose
        count is 0 may be missing.
    """

    num_cycles: dict[str, int] = field(default_factory=dict)
    num_accepted_drafts: dict[str, int] = field(default_factory=dict)
    num_target_tokens: int = 0

    def add_cycle(self, source: str, num_accepted: int, num_tokens: int) -> None:
        """One more cycle, which committed num_tokens tokens, accepted drafts included."""
        self.num_cycles[source] = self.num_cycles.get(source, 0) + 1
        if num_accepted:
            num_before = self.num_accepted_drafts.get(source, 0)
            self.num_accepted_drafts[source] = num_before + num_accepted
        self.num_target_tokens += num_tokens - num_accepted

    def add_tokens(self, num_tokens: int) -> None:
        """Tokens committed outside the cycles."""
        self.num_target_tokens += num_tokens

    def __add__(self, other: "RequestStats") -> "RequestStats":
        return RequestStats(
            Counter(self.num_cycles) + Counter(other.num_cycles),
            Counter(self.num_accepted_drafts) + Counter(other.num_accepted_drafts),
            self.num_target_tokens + other.num_target_tokens,
        )

    def figures(self) -> dict[str, int]:
        """All counts by name, as responses show them."""
        plain, *drafted = SOURCES.labels
        return {
            **{f"num_{label}_cycles": self.num_cycles.get(label, 0) for label in (*drafted, plain)},
            **{
                f"num_{label}_accepted_drafts": self.num_accepted_drafts.get(label, 0)
                for label in drafted
            },
            "num_target_tokens": self.num_target_tokens,
        }
