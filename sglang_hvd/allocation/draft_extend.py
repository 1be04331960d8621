"""When the model drafter catches up on what was committed without it."""

import enum
from collections.abc import Sequence

from sglang_hvd.config import HvdConfig, PostponeExtend

# Tokens that the model drafter's KV cache lacks of a request from which it is brought up to date,
# whatever the request does.
MAX_POSTPONED_TOKENS = 64

# The same of all requests of a step together, where none is brought up to date in steps without
# drafts: the target's hidden states of as many are kept, of an 8B model 24 KB a token.
_MOST_OF_BATCH = 4096


class DraftExtend(enum.Enum):
    """When draft-extend runs, which brings the model drafter's KV cache up to date.

    EVERY_STEP: behind each verification, for all of its requests.
    BEHIND_DRAFTS: likewise, but not behind steps without drafts: those that lack something catch up
        in the next one that has some.
    WHEN_DRAFTING: for a request when it drafts next.
    NEVER: the policy does not draft with the model drafter.

    The requests of a step are those of num_model_nodes, the nodes of the model drafter's draft that
    each verifies, and of num_missing, the tokens that the model drafter's KV cache lacks of each.
    has_drafts: the step has room for drafts: it verifies more than one node of each request.
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

    def follows(self, *, has_drafts: bool) -> bool:
        """Whether draft-extend runs behind a step's verification, for all of its requests."""
        return self is DraftExtend.EVERY_STEP or (self is DraftExtend.BEHIND_DRAFTS and has_drafts)

    def catching_up(
        self, num_model_nodes: Sequence[int], num_missing: Sequence[int], *, has_drafts: bool
    ) -> list[int]:
        """Rows of the requests that catch up before a step's verification."""
        if not self.catches_up:
            return []
        if self is DraftExtend.BEHIND_DRAFTS:
            most = min(MAX_POSTPONED_TOKENS, _MOST_OF_BATCH // len(num_missing))
            is_due = has_drafts or max(num_missing) >= most
            return [row for row, missing in enumerate(num_missing) if missing > 0 and is_due]
        return [
            row
            for row, (num_nodes, missing) in enumerate(
                zip(num_model_nodes, num_missing, strict=True)
            )
            if missing > 0 and (num_nodes > 0 or missing >= MAX_POSTPONED_TOKENS)
        ]

    def missing_after(
        self,
        num_model_nodes: Sequence[int],
        num_missing: Sequence[int],
        num_tokens: Sequence[int],
        *,
        has_drafts: bool,
    ) -> list[int]:
        """Tokens that the model drafter's KV cache lacks of each request after a step.

        num_tokens: committed in the step.
        """
        if self is DraftExtend.NEVER or self.follows(has_drafts=has_drafts):
            return [0] * len(num_missing)
        missing = list(num_missing)
        for row in self.catching_up(num_model_nodes, num_missing, has_drafts=has_drafts):
            missing[row] = 0
        return [before + new for before, new in zip(missing, num_tokens, strict=True)]
