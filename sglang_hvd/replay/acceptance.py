"""Acceptance in replay: which tokens of a draft agree with the recording."""

import numpy as np
import numpy.typing as npt

from sglang_hvd.types import DraftPlan, TokenIds, VerifyOutcome


def outcome_of(
    plan: DraftPlan, rest: TokenIds, num_cache_accepted: int, num_model_accepted: int
) -> VerifyOutcome:
    """What the target model makes of a cycle.

    rest: tokens of the recording from the start of the cycle on.
    num_cache_accepted, num_model_accepted: tokens of the cache's chain and of the model drafter's
        draft that agree with the recording.
    """
    of_cache = of_model = 0
    if plan.cache_draft is not None:
        of_cache = min(num_cache_accepted, plan.cache_draft.num_tokens)
        if plan.cache_draft.parents is not None:
            of_cache = len(right_branch(plan.cache_draft.token_ids, plan.cache_draft.parents, rest))
    if plan.num_model_nodes:
        of_model = min(num_model_accepted, len(rest))
    num_accepted = max(of_cache, of_model)
    return VerifyOutcome(
        rest[: num_accepted + 1],
        num_accepted,
        of_model if plan.cache_draft is not None and plan.num_model_nodes else None,
    )


def num_agreeing(draft_ids: TokenIds, text_ids: TokenIds) -> int:
    """Leading tokens of a draft that agree with the text."""
    length = min(len(draft_ids), len(text_ids))
    agrees = draft_ids[:length] == text_ids[:length]
    return length if agrees.all() else int(agrees.argmin())


def right_branch(token_ids: TokenIds, parents: npt.NDArray[np.int32], text: TokenIds) -> list[int]:
    """The nodes of a tree that go on as the text does, from its first token on."""
    branch: list[int] = []
    for token in text.tolist():
        before = branch[-1] if branch else -1
        following = np.flatnonzero((parents == before) & (token_ids == token))
        if len(following) == 0:
            break
        branch.append(int(following[0]))
    return branch
