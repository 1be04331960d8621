"""The cycle of one request: rows of the values that hold a whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hvd.types import (
    MATCH_COLUMNS,
    DraftPlans,
    HostDrafts,
    MatchOrigin,
    TokenIds,
    VerifyOutcomes,
)

_COLUMNS = [MATCH_COLUMNS.index(name) for name in ("match_len", "score", "origin")]
_NUM_TOKENS = MATCH_COLUMNS.index("num_tokens")


class CacheDraft(NamedTuple):
    """One row of HostDrafts.

    token_ids: int32[num_tokens], read-only, never empty.
    match_len: number of tokens before the draft that matched an earlier place.
    score: sum of each token's estimated probability (SuffixDecoding's score), over the chain that
        the cache proposed. The draft may be the first tokens of that chain.
    source: the text of the match: the request's own prompt and output, or finished requests.
    parents: int32[num_tokens], read-only; as in DraftBatch. None for a chain.
    """

    token_ids: TokenIds
    match_len: int
    score: float
    source: Literal["request", "shared"]
    parents: npt.NDArray[np.int32] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class DraftPlan(NamedTuple):
    """One row of DraftPlans.

    source: label of the sources whose drafts the request verifies.
    cache_draft: the draft of the host's sources to verify; None without one.
    predicted_len: predicted accepted length of the request's cache draft in tokens, bonus token not
        counted; None if nothing was predicted (no cache draft, or a policy without predictor).
    num_model_nodes, num_model_steps: size of the model drafter's draft to verify, root not counted,
        and the steps it comes from; 0 if it is not verified.
    """

    source: str
    cache_draft: CacheDraft | None
    predicted_len: float | None
    num_model_nodes: int = 0
    num_model_steps: int = 0

    @property
    def num_nodes(self) -> int:
        """Nodes to verify, root not counted, if the drafts share none."""
        num_cache = 0 if self.cache_draft is None else self.cache_draft.num_tokens
        return num_cache + self.num_model_nodes


@dataclass(frozen=True, slots=True, eq=False)
class VerifyOutcome:
    """One row of VerifyOutcomes.

    token_ids: the tokens committed in this cycle, the bonus token included.
    num_accepted_drafts: how many of them are accepted draft tokens.
    num_model_accepted: tokens of the model drafter's draft that were right, if it was verified
        together with another draft and this is known; else None.
    """

    token_ids: TokenIds | Sequence[int]
    num_accepted_drafts: int
    num_model_accepted: int | None = None


def single_drafts(drafts: HostDrafts) -> list[CacheDraft | None]:
    """The draft of each request, None for one that has none."""
    rows: list[CacheDraft | None] = []
    for tokens, parents, length, is_tree, (match_len, score, origin) in zip(
        drafts.token_ids,
        drafts.parents,
        drafts.num_nodes.tolist(),
        drafts.are_trees.tolist(),
        drafts.matches[:, _COLUMNS].tolist(),
        strict=True,
    ):
        source: Literal["request", "shared"] = (
            "shared" if origin == MatchOrigin.SHARED else "request"
        )
        before = parents[:length] if is_tree else None
        draft = CacheDraft(tokens[:length], int(match_len), score, source, before)
        rows.append(draft if length else None)
    return rows


def single_plans(plans: DraftPlans) -> list[DraftPlan]:
    """The plan of each request."""
    predicted: list[float | None] = [None] * len(plans)
    if plans.predicted is not None:
        were_proposed = (plans.drafts.matches[:, _NUM_TOKENS] > 0).tolist()
        predicted = [
            length if was_proposed else None
            for length, was_proposed in zip(plans.predicted.tolist(), were_proposed, strict=True)
        ]
    return [
        DraftPlan(source, draft, predicted_len, num_nodes, num_steps if num_nodes else 0)
        for source, draft, predicted_len, num_nodes, num_steps in zip(
            plans.sources,
            single_drafts(plans.drafts),
            predicted,
            plans.num_model_nodes.tolist(),
            plans.model_steps.tolist(),
            strict=True,
        )
    ]


def outcome_batch(outcomes: Sequence[VerifyOutcome]) -> VerifyOutcomes:
    """The outcomes of single requests as a batch."""
    lengths = np.array([len(outcome.token_ids) for outcome in outcomes], np.int32)
    token_ids = np.zeros((len(outcomes), int(lengths.max(initial=0))), np.int32)
    for row, outcome in zip(token_ids, outcomes, strict=True):
        row[: len(outcome.token_ids)] = outcome.token_ids
    of_model = [outcome.num_model_accepted for outcome in outcomes]
    return VerifyOutcomes(
        token_ids,
        lengths,
        np.array([outcome.num_accepted_drafts for outcome in outcomes], np.int32),
        np.array([-1 if num is None else num for num in of_model], np.int32),
    )
