"""An active request: what it verifies in the cycle to commit, and what that cycle tells."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_hvd.payoff import VerifiedCacheDraft, VerifiedModelDraft
from sglang_hvd.request_stats import RequestStats
from sglang_hvd.suffix_cache.token_ids import as_token_ids, num_agreeing, right_branch
from sglang_hvd.types import DraftPlan, DraftSource, TokenIds, VerifyOutcome

_NOTHING = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class DraftedRequest:
    """planned: the cycle to commit. draft_len: of the whole cache chain then. chain, chain_len: the
    tokens of that and of how many the cycle tells; a tree has branches beside it.

    Under the allocate policy, which verifies parts of drafts, model_size: of the model drafter's
    draft, which has fewer nodes in few steps; cache_expected, model_expected: accepted tokens
    expected of that chain and of that draft; branch_expected: of the branches beside the chain,
    were the votes always right there.
    """

    slot: int
    without_cache: bool
    planned: DraftPlan | None = None
    draft_len: int = 0
    chain: TokenIds = field(default_factory=lambda: _NOTHING)
    chain_len: int = 0
    model_size: int = 0
    cache_expected: float = 0.0
    branch_expected: float = 0.0
    model_expected: float = 0.0
    stats: RequestStats = RequestStats()  # noqa: RUF009  it is immutable

    @property
    def plan(self) -> DraftPlan:
        """Of the cycle to commit."""
        assert self.planned is not None, "a cycle must be planned before it is committed"
        return self.planned

    def end_cycle(self, outcome: VerifyOutcome) -> None:
        """Counts it; the next one has to be planned."""
        self.stats = self.stats.after_cycle(self.plan.source, outcome)
        self.planned = None

    def num_chain_accepted(self, outcome: VerifyOutcome) -> int | None:
        """Tokens of the cache draft's chain that were right; None if none of it was verified."""
        plan = self.plan
        if plan.cache_draft is None or not self.chain_len:
            return None
        if plan.source is DraftSource.CACHE and plan.cache_draft.parents is None:
            return outcome.num_accepted_drafts
        return num_agreeing(self.chain[: self.chain_len], as_token_ids(outcome.token_ids))

    def for_history(self, num_chain_accepted: int | None) -> int | None:
        """What the predictor's features are told. They are of whole drafts: of a part that was
        accepted whole, nothing."""
        if num_chain_accepted is None:
            return None
        is_cut = self.chain_len < self.draft_len
        return None if is_cut and num_chain_accepted == self.chain_len else num_chain_accepted

    def verified_chain(self, num_chain_accepted: int | None) -> VerifiedCacheDraft | None:
        """What was expected of the part of the chain that was verified, and what was accepted."""
        if num_chain_accepted is None:
            return None
        return VerifiedCacheDraft(num_chain_accepted, self.chain_len, self.cache_expected)

    def num_branches_accepted(
        self, outcome: VerifyOutcome, num_chain_accepted: int | None
    ) -> int | None:
        """Tokens of the cache draft that were right beyond its chain; None where there were no
        branches. Of both drafts in one tree the accepted path is the longer one: as far as it lies
        in the cache draft, and no further, that was right."""
        draft = self.plan.cache_draft
        if draft is None or draft.parents is None or self.branch_expected == 0:
            return None
        num_right = outcome.num_accepted_drafts
        of_model = 0 if self.plan.source is DraftSource.CACHE else outcome.num_model_accepted
        if of_model is None or of_model == num_right:  # else all of them were the cache draft's
            text_ids = as_token_ids(outcome.token_ids)
            num_right = len(right_branch(draft.token_ids, draft.parents, text_ids))
        # A chain whose first token was right but not verified had nothing accepted.
        return max(num_right - (num_chain_accepted or 0), 0)

    def num_model_accepted(self, outcome: VerifyOutcome) -> int | None:
        """Tokens of the model drafter's draft that were right; None if it was not verified, or both
        were and that is not known."""
        if self.plan.num_model_nodes == 0:
            return None
        if self.plan.source is DraftSource.BOTH:
            return outcome.num_model_accepted
        return outcome.num_accepted_drafts

    def verified_model_draft(self, outcome: VerifyOutcome) -> VerifiedModelDraft | None:
        """What was expected of the part of the model drafter's draft that was verified, and what
        was accepted."""
        num_accepted = self.num_model_accepted(outcome)
        if num_accepted is None:
            return None
        return VerifiedModelDraft(
            num_accepted, self.model_size, self.plan.num_model_steps, self.model_expected
        )


def slots_of(requests: Iterable[DraftedRequest]) -> npt.NDArray[np.int32]:
    """By which tracker, expectations and allocator know them: int32[num_requests]."""
    return np.array([request.slot for request in requests], np.int32)
