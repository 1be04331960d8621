"""The values that the core and the serving plugin hand to each other."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


class DraftSource(enum.Enum):
    """What one request verifies in one cycle."""

    CACHE = "cache"  # the cache draft
    MODEL = "model"  # the model drafter's draft
    PLAIN = "plain"  # nothing: the target model decodes one token


@dataclass(frozen=True, slots=True, eq=False)
class CacheDraft:
    """A continuation that the suffix cache proposes for one request.

    token_ids: int32[num_tokens], read-only, never empty.
    match_len: number of tokens before the draft that matched an earlier place.
    score: sum over the draft of each token's estimated probability (SuffixDecoding's score).
    source: where the match lies, in the request's own prompt and output or in finished requests.
    """

    token_ids: TokenIds
    match_len: int
    score: float
    source: Literal["request", "shared"]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlan:
    """What one request verifies in its next cycle.

    cache_draft: the draft to verify when source is CACHE, else None.
    payoff: predicted accepted length of the request's cache draft in tokens, bonus token not
        counted; None where nothing was predicted (no cache draft, or a policy without predictor).
    """

    source: DraftSource
    cache_draft: CacheDraft | None
    payoff: float | None


@dataclass(frozen=True, slots=True, eq=False)
class VerifyOutcome:
    """What the target model made of one request's cycle.

    token_ids: the tokens committed in this cycle, the bonus token included.
    num_accepted_drafts: how many of them are accepted draft tokens. All of them when the request
        ended inside its draft, else all but the bonus token.

    Raises ValueError when the two disagree.
    """

    token_ids: TokenIds | Sequence[int]
    num_accepted_drafts: int

    def __post_init__(self) -> None:
        if self.num_target_tokens not in (0, 1) or self.num_accepted_drafts < 0:
            raise ValueError(
                f"a cycle commits its accepted drafts and at most one bonus token, got "
                f"{len(self.token_ids)} tokens with {self.num_accepted_drafts} accepted drafts"
            )

    @property
    def num_target_tokens(self) -> int:
        """1 if the target model added its bonus token, else 0."""
        return len(self.token_ids) - self.num_accepted_drafts
