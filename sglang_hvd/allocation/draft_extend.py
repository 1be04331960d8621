"""When the model drafter catches up on what was committed without it."""

import enum
from collections.abc import Sequence

from sglang_hvd.config import HvdConfig, PostponeExtend

# Tokens that the model drafter's KV cache lacks of a request from which it is brought up to date,
# whatever the request does.
MAX_POSTPONED_TOKENS = 64

# The same of all requests of a step together: the target's hidden states of as many are kept, of an
# 8B model 24 KB a token.
_MOST_MISSING = 4096

# Steps of such a run behind which draft-extend follows all the same. To catch up costs about as
# much as theirs do, so whatever the run's length, both take at most twice the least (ski rental).
_FIRST_OF_RUN = 8


class DraftExtend(enum.Enum):
    """When draft-extend runs, which brings the model drafter's KV cache up to date.

    EVERY_STEP: behind each verification, for all of its requests.
    BEHIND_DRAFTS: likewise, but for runs of steps without drafts only behind the first few: those
        that lack something catch up in the next step that has room for drafts.
    WHEN_DRAFTING: for a request when it drafts next.
    NEVER: the policy does not draft with the model drafter.

    num_plain: steps of one node per request, which have no drafts, one after the other up to the
        step in question: 0 if that has room for drafts, 1 for the first of a run, ...
    num_model_nodes: of the model drafter's draft that each request of the step verifies.
    num_missing: tokens that the model drafter's KV cache lacks of each before the step.
    """

    EVERY_STEP = enum.auto()
    BEHIND_DRAFTS = enum.auto()
    WHEN_DRAFTING = enum.auto()
    NEVER = enum.auto()

    @classmethod
    def of(cls, config: HvdConfig, *, default: PostponeExtend) -> "DraftExtend":
        """As the settings want it. default: where they leave it open."""
        if not config.drafts_with_model:
            return cls.NEVER
        wanted: dict[PostponeExtend, DraftExtend] = {
            "never": cls.EVERY_STEP,
            "plain": cls.BEHIND_DRAFTS,
            "always": cls.WHEN_DRAFTING,
        }
        return wanted[config.postpone_extend or default]

    @property
    def catches_up(self) -> bool:
        """Whether anything is ever caught up with."""
        return self in (DraftExtend.BEHIND_DRAFTS, DraftExtend.WHEN_DRAFTING)

    def follows(self, num_plain: int) -> bool:
        """Whether draft-extend runs behind a step's verification, for all of its requests."""
        if self is DraftExtend.BEHIND_DRAFTS:
            return num_plain <= _FIRST_OF_RUN
        return self is DraftExtend.EVERY_STEP

    def ends_run(self, most_missing: int, num_requests: int) -> bool:
        """Whether the next step of so many requests catches up even if it has no drafts. It has to
        wait for that, and may as well be planned.

        most_missing: of num_missing, the largest.
        """
        return self is DraftExtend.BEHIND_DRAFTS and most_missing >= _most_missing(num_requests)

    def catching_up(
        self, num_model_nodes: Sequence[int], num_missing: Sequence[int], num_plain: int
    ) -> list[int]:
        """Rows of the requests that catch up before a step's verification."""
        if not self.catches_up:
            return []
        if self is DraftExtend.BEHIND_DRAFTS:
            if num_plain > 0 and not self.ends_run(max(num_missing), len(num_missing)):
                return []
            return [row for row, missing in enumerate(num_missing) if missing > 0]
        most = _most_missing(len(num_missing))
        is_due = [
            missing > 0 and (num_nodes > 0 or missing >= most)
            for num_nodes, missing in zip(num_model_nodes, num_missing, strict=True)
        ]
        if not any(is_due):
            return []
        # Those that would be due soon join: a forward takes little longer for it.
        return [
            row for row, missing in enumerate(num_missing) if is_due[row] or 2 * missing >= most
        ]

    def most_missing(self, most_nodes: int) -> int:
        """Tokens that the model drafter's KV cache lacks at most, of all requests together.

        most_nodes: of a step, which may all be accepted.
        """
        if not self.catches_up:
            return 0
        # A run without drafts commits one token of each request, and is ended in time.
        return _MOST_MISSING + (most_nodes if self is DraftExtend.WHEN_DRAFTING else 0)

    def missing_after(
        self,
        num_model_nodes: Sequence[int],
        num_missing: Sequence[int],
        num_tokens: Sequence[int],
        num_plain: int,
    ) -> list[int]:
        """Tokens that the model drafter's KV cache lacks of each request after a step.

        num_tokens: committed in the step.
        """
        if self is DraftExtend.NEVER or self.follows(num_plain):
            return [0] * len(num_missing)
        missing = list(num_missing)
        for row in self.catching_up(num_model_nodes, num_missing, num_plain):
            missing[row] = 0
        return [before + new for before, new in zip(missing, num_tokens, strict=True)]


def _most_missing(num_requests: int) -> int:
    """Tokens that may be missing of each of so many requests."""
    return min(MAX_POSTPONED_TOKENS, max(_MOST_MISSING // num_requests, 1))
