"""Decides when the model drafter's KV cache receives the tokens that were committed without it."""

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_hvd.config import HvdConfig, PostponeExtend

_Ints = Sequence[int] | npt.NDArray[np.integer[Any]]

# Missing tokens of one request at which it catches up, whatever it does. Steps are not counted.
MAX_POSTPONED_TOKENS = 64

# The same for all requests of a step together. The target's hidden states of so many tokens are
# kept: 24 KB per token for an 8B model.
_MAX_MISSING = 4096

# Steps of a run without drafts that draft-extend follows anyway. Catching up costs about as much as
# the draft-extends of these steps, so whatever the length of the run, the total is at most twice
# the minimum (ski rental).
_FIRST_OF_RUN = 8


class DraftExtend(enum.Enum):
    """When draft-extend runs, which brings the model drafter's KV cache up to date.

    EVERY_STEP: after each verification, for all of its requests.
    AFTER_DRAFTS: as EVERY_STEP, but in a run of steps without drafts only after the first few.
        Requests with missing tokens catch up in the next step that has room for drafts.
    WHEN_DRAFTING: for a request when it drafts next.
    NEVER: the policy does not draft with the model drafter.

    The values are those of /server_info. The setting postpone_extend names the first three never,
    plain and always.

    num_plain: consecutive steps of one node per request, which have no drafts, up to the step in
        question: 0 if that step has room for drafts, 1 for the first of a run, ...
    num_model_nodes: nodes of the model drafter's draft that each request of the step verifies.
    num_missing: tokens of each request that are missing from the model drafter's KV cache before
        the step.
    """

    EVERY_STEP = "every_step"
    AFTER_DRAFTS = "after_drafts"
    WHEN_DRAFTING = "when_drafting"
    NEVER = "never"

    @classmethod
    def of(cls, config: HvdConfig, *, default: PostponeExtend) -> "DraftExtend":
        """The mode that the settings ask for. default: the mode if they name none."""
        if not config.drafts_with_model:
            return cls.NEVER
        wanted: dict[PostponeExtend, DraftExtend] = {
            "never": cls.EVERY_STEP,
            "plain": cls.AFTER_DRAFTS,
            "always": cls.WHEN_DRAFTING,
        }
        return wanted[config.postpone_extend or default]

    @property
    def catches_up(self) -> bool:
        """Whether requests ever have to catch up."""
        return self in (DraftExtend.AFTER_DRAFTS, DraftExtend.WHEN_DRAFTING)

    def follows(self, num_plain: int) -> bool:
        """Whether draft-extend runs after a step's verification, for all of its requests."""
        if self is DraftExtend.AFTER_DRAFTS:
            return num_plain <= _FIRST_OF_RUN
        return self is DraftExtend.EVERY_STEP

    def ends_run(self, max_missing: int, num_requests: int) -> bool:
        """Whether the next step of so many requests catches up even if it has no drafts. Such
        a step has to wait anyway, so it is planned and does not run ahead.

        max_missing: the largest of num_missing.
        """
        return self is DraftExtend.AFTER_DRAFTS and max_missing >= _max_missing(num_requests)

    def catching_up(self, num_model_nodes: _Ints, num_missing: _Ints, num_plain: int) -> list[int]:
        """Rows of the requests that catch up before a step's verification."""
        if not self.catches_up:
            return []
        nodes, missing = np.asarray(num_model_nodes), np.asarray(num_missing)
        is_due = missing > 0
        if self is DraftExtend.AFTER_DRAFTS:
            if num_plain > 0 and not self.ends_run(int(missing.max()), len(missing)):
                return []
        else:
            limit = _max_missing(len(missing))
            is_due &= (nodes > 0) | (missing >= limit)
            if is_due.any():
                # Requests that would be due soon join: the forward takes little longer for them.
                is_due |= 2 * missing >= limit
        return np.flatnonzero(is_due).tolist()

    def max_missing(self, max_nodes: int) -> int:
        """The most tokens of all requests together that can be missing.

        max_nodes: nodes of the largest step, which may all be accepted.
        """
        if not self.catches_up:
            return 0
        # A run without drafts commits one token of each request per step, and ends at the limit.
        return _MAX_MISSING + (max_nodes if self is DraftExtend.WHEN_DRAFTING else 0)

    def missing_after(
        self,
        num_model_nodes: _Ints,
        num_missing: Sequence[int],
        num_tokens: Sequence[int],
        num_plain: int,
    ) -> list[int]:
        """Tokens of each request that are missing from the model drafter's KV cache after a step.

        num_tokens: tokens of each request that the step committed.
        """
        if self is DraftExtend.NEVER or self.follows(num_plain):
            return [0] * len(num_missing)
        missing = list(num_missing)
        for row in self.catching_up(num_model_nodes, num_missing, num_plain):
            missing[row] = 0
        return [before + new for before, new in zip(missing, num_tokens, strict=True)]


def _max_missing(num_requests: int) -> int:
    """The most tokens that may be missing of each of so many requests."""
    return min(MAX_POSTPONED_TOKENS, max(_MAX_MISSING // num_requests, 1))
