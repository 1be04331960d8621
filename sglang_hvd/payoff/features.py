"""The predictor's features: the paper's groups (appendix B, table 9), known before verification.

| name | definition |
|---|---|
| score | score of the cache draft (sum of its tokens' estimated probabilities) |
| match_len | tokens before the draft that matched |
| draft_len | tokens of the draft |
| log_prompt_len | ln(1 + prompt tokens) |
| log_generated_len | ln(1 + tokens generated so far) |
| relative_position | generated / (prompt + generated) tokens |
| recent_cache_rate | share of the request's latest cycles that verified a cache draft |
| recent_mean_accepted | mean accepted length of those cache drafts, 0 without any |
| recent_last_accepted | accepted length of the latest of them, 0 without any |
| whitespace ... delimiter | share of the draft's tokens in each token class |

The latest cycles are the request's last `history_window` ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.payoff.history import RequestHistory
from sglang_hvd.payoff.token_classes import TokenClass, TokenClasses
from sglang_hvd.types import CacheDraft

FEATURE_NAMES = (
    "score",
    "match_len",
    "draft_len",
    "log_prompt_len",
    "log_generated_len",
    "relative_position",
    "recent_cache_rate",
    "recent_mean_accepted",
    "recent_last_accepted",
    *(token_class.name.lower() for token_class in TokenClass if token_class.name),
)


@dataclass(frozen=True, slots=True)
class DecodeState:
    """Where a request stands when its cache draft is proposed. Lengths are in tokens."""

    prompt_len: int
    generated_len: int
    history: RequestHistory


def build_features(
    drafts: Sequence[CacheDraft], states: Sequence[DecodeState], token_classes: TokenClasses
) -> npt.NDArray[np.float32]:
    """float32[num_drafts, len(FEATURE_NAMES)]: one row per cache draft and its request's state."""
    features = np.empty((len(drafts), len(FEATURE_NAMES)), dtype=np.float32)
    for row, draft, state in zip(features, drafts, states, strict=True):
        context_len = state.prompt_len + state.generated_len
        row[0] = draft.score
        row[1] = draft.match_len
        row[2] = draft.num_tokens
        row[3] = np.log1p(state.prompt_len)
        row[4] = np.log1p(state.generated_len)
        row[5] = state.generated_len / context_len
        row[6] = state.history.cache_rate
        row[7] = state.history.mean_accepted
        row[8] = state.history.last_accepted
        row[9:] = token_classes.shares(draft.token_ids)
    return features
