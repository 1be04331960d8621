"""An active request: what it verifies in the cycle to commit, and what its cycles brought."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_hvd.drafter.cycles import Cycles
from sglang_hvd.request_stats import RequestCounts
from sglang_hvd.suffix_cache.token_ids import right_branch
from sglang_hvd.types import DraftPlan, DraftSource, TokenIds


@dataclass(slots=True, eq=False)
class DraftedRequest:
    """planned: the cycle to commit, and cycles: those of its batch, where it has this place."""

    slot: int
    without_cache: bool
    planned: DraftPlan | None = None
    cycles: Cycles | None = None
    place: int = 0
    counts: RequestCounts = field(default_factory=RequestCounts)

    @property
    def plan(self) -> DraftPlan:
        """Of the cycle to commit."""
        assert self.planned is not None, "a cycle must be planned before it is committed"
        return self.planned

    def end_cycle(self, num_accepted: int, num_tokens: int) -> None:
        """Counts it; the next one has to be planned.

        num_accepted: draft tokens that were accepted. num_tokens: committed, these included.
        """
        self.counts.add_cycle(self.plan.source, num_accepted, num_tokens)
        self.planned = self.cycles = None

    def num_branches_accepted(
        self, text_ids: TokenIds, num_accepted: int, num_model_accepted: int, chain_accepted: int
    ) -> int:
        """Tokens of the cache draft, which branches, that were right beyond its chain. Of both
        drafts in one tree the accepted path is the longer one: as far as it lies in the cache
        draft, and no further, that was right.

        text_ids: committed. num_accepted, num_model_accepted: as in VerifyOutcomes.
        chain_accepted: tokens of the chain that were right; below 0 where none of it was verified.
        """
        draft, num_right = self.plan.cache_draft, num_accepted
        assert draft is not None
        assert draft.parents is not None
        of_model = 0 if self.plan.source is DraftSource.CACHE else num_model_accepted
        if of_model < 0 or of_model == num_right:  # else all of them were the cache draft's
            num_right = len(right_branch(draft.token_ids, draft.parents, text_ids))
        # A chain whose first token was right but not verified had nothing accepted.
        return max(num_right - max(chain_accepted, 0), 0)


def cycles_of(requests: Sequence[DraftedRequest]) -> Cycles:
    """The cycles to commit of one request or more; entry i belongs to requests[i]."""
    batch, places = requests[0].cycles, [request.place for request in requests]
    if batch is not None and all(request.cycles is batch for request in requests):
        is_whole = len(batch.num_cache) == len(places) and places == list(range(len(places)))
        return batch if is_whole else batch.select(places)
    parts = [r.cycles.select([r.place]) for r in requests if r.cycles is not None]
    assert len(parts) == len(requests), "a cycle must be planned before it is committed"
    return Cycles.concatenate(parts)


def slots_of(requests: Iterable[DraftedRequest]) -> npt.NDArray[np.int32]:
    """By which tracker, expectations and allocator know them: int32[num_requests]."""
    return np.array([request.slot for request in requests], np.int32)
