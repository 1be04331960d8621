"""The predictor's inputs, which are known before verification. native/features.hpp computes them.

The first fourteen are the paper's (appendix B, table 9); its predictor reads no others.

| name | definition |
|---|---|
| score | score of the cache draft: the sum of its tokens' estimated probabilities |
| match_len | matched tokens before the draft |
| draft_len | tokens of the draft |
| log_prompt_len | ln(1 + prompt tokens) |
| log_generated_len | ln(1 + tokens generated so far) |
| relative_position | generated / (prompt + generated) tokens |
| recent_cache_rate | share of the request's latest cycles that verified a cache draft |
| recent_mean_accepted | mean accepted length of those cache drafts, 0 without any |
| recent_last_accepted | accepted length of the latest of them, 0 without any |
| whitespace ... delimiter | share of the draft's tokens in each of the paper's token classes |
| logit_prob_k | log odds of the estimated probability that k tokens are accepted |
| score_6 | the score of the first six tokens |
| in_prompt, in_output | whether the match is in the prompt, or in the request's own output |
| log_match_len, log_age | ln(1 + matched tokens), ln(1 + tokens since the match) |
| log_occurrences, log_agreeing, share_agreeing | earlier occurrences of the context; those that \
the draft's first token followed; the share of the latter |
| agreement, mean_agreement | share of the votes for the first token, mean share over all tokens |
| votes_* | the same for the draft that the votes propose; only in cache mode paper it differs |
| votes_log_agreeing_len, votes_agreeing_share, votes_is_same | leading tokens in which the two \
drafts agree, their share of the draft, whether they are all of it |
| votes_logit_agreed, votes_logit_agreed_6, votes_score_agreed | by the votes' probabilities: log \
odds that all these tokens are accepted, log odds that six of them are, and their score |
| agreed_share_k | share of the k-th latest cycle's committed tokens that the cache draft had \
right, whether or not that draft was verified |
| moving_share_k | the same over the latest tokens, with a half-life of k tokens |
| agreed_share | the same over all cycles |
| log_committed | ln(1 + tokens committed in cycles) |
| agreed_k, committed_k | tokens of the k-th latest cycle: had right, committed |
| log_run | ln(1 + tokens of the latest cycles without a token that the cache draft had wrong) |
| is_place_known ... place_shift | position of the match, relative to where it would be if the \
copy of the cycle before continued: known, the same, within 3 tokens, up to 64 after, up to 64 \
before, and signed ln(1 + distance) |
| aligned, in_common | shares of the 32 tokens before the draft that are also before its source, \
at the same distance and at any distance; for the votes' draft |
| own_logit_right_k, logit_right_k | log odds that the draft's first k tokens are right, from how \
often drafts had each token right after the one before it: drafts of this request, and of all \
requests in its namespace |
| own_logit_right_least, logit_right_least | the same for the least probable of its first six \
tokens |
| log_since_* | ln(1 + tokens after the text's latest line break, punctuation, and bracket or \
delimiter); all tokens if there is none |
| covers_line, exceeds_line, log_beyond_line | whether the match covers all tokens after the line \
break, whether it has more, and ln(1 + how many more); by votes a match has at most 32 tokens |
| latest_* | share of the output's latest 64 tokens in each token class |
| log_first_* | ln(1 + tokens of the draft before its first line break, punctuation, bracket or \
delimiter, and digit), with 128 tokens if it has none |
| logit_other_k, log_others_k | alternatives to the k-th token of the votes' draft: log odds of \
the estimated probability that the likeliest one follows if all tokens before it are right, and \
ln(1 + number of alternatives with votes) |
| before_2_*, before_1_*, token_k_* | whether the two tokens before the draft, and its first \
three tokens, are in each token class |

The latest cycles of recent_* are the request's last `history_window` cycles. If a cycle verified
only the first tokens of a draft and all were accepted, it does not show how right the draft was, so
it counts as a cycle without a cache draft.

Each token of the draft has inputs of its own, POSITION_FEATURES. Three of them are log odds,
divided by four, that the token is accepted if its predecessor is:

- by the draft's own probabilities,
- by the votes,
- by how often it followed the two tokens before it, as (followed + .3) / (did not follow + .3), at
  the latest two places of these two tokens in the request's text.

The others are a tenth of ln(1 + tokens since the text last had the token), and the classes of both
tokens. Only the first four tokens are looked up in the text. For the others, the two inputs from
the text are 0.

own_logit_right_k and logit_right_k say how often drafts had tokens right
(native/token_outcomes.hpp). The committed tokens of a cycle show which tokens of its draft were
right up to the first wrong one. The draft need not have been verified for that. The share of right
tokens is kept for each token, and for each pair of a token and its predecessor. The prior of a pair
is the token's share, with the weight of two tokens. The prior of a token is .75, with the weight of
three. The result is clamped to .01 to .99.
"""

from sglang_hvd._native import MAX_DEPTH, NUM_DRAFT_FEATURES, NUM_POSITION_FEATURES
from sglang_hvd.payoff.token_classes import PAPER_CLASSES, TokenClass
from sglang_hvd.types import EVIDENCE_DEPTH

_CLASSES = tuple(c.name.lower() for c in TokenClass if c.name)
_PAPER_CLASSES = tuple(c.name.lower() for c in PAPER_CLASSES if c.name)
_MATCH = (
    "in_prompt",
    "in_output",
    "log_match_len",
    "log_age",
    "log_occurrences",
    "log_agreeing",
    "share_agreeing",
    "agreement",
    "mean_agreement",
)

PAPER_FEATURES: tuple[str, ...] = (
    "score",
    "match_len",
    "draft_len",
    "log_prompt_len",
    "log_generated_len",
    "relative_position",
    "recent_cache_rate",
    "recent_mean_accepted",
    "recent_last_accepted",
    *_PAPER_CLASSES,
)

FEATURE_NAMES: tuple[str, ...] = (
    *PAPER_FEATURES,
    *(f"logit_prob_{depth}" for depth in (1, 2, 3, 4, 6, 8, 12, 16, 24)),
    "score_6",
    *_MATCH,
    "votes_log_agreeing_len",
    "votes_agreeing_share",
    "votes_is_same",
    "votes_logit_agreed",
    "votes_logit_agreed_6",
    "votes_score_agreed",
    "votes_score",
    *(f"votes_logit_prob_{depth}" for depth in (1, 3, 10, 16)),
    *(f"votes_{name}" for name in _MATCH),
    *(f"agreed_share_{back}" for back in (1, 2, 3, 4)),
    *(f"moving_share_{half_life}" for half_life in (4, 16, 64, 256)),
    "agreed_share",
    "log_committed",
    "agreed_1",
    "agreed_2",
    "committed_1",
    "committed_2",
    "log_run",
    "is_place_known",
    "is_place_same",
    "is_place_near",
    "is_place_ahead",
    "is_place_behind",
    "place_shift",
    "aligned",
    "in_common",
    *(f"{whose}logit_right_{num}" for whose in ("own_", "") for num in (1, 3, 6, "least")),
    *(f"log_since_{mark}" for mark in ("line_break", "punctuation", "structure")),
    "covers_line",
    "exceeds_line",
    "log_beyond_line",
    *(f"latest_{name}" for name in _CLASSES),
    *(f"log_first_{mark}" for mark in ("line_break", "punctuation", "structure", "digit")),
    *(f"logit_other_{depth}" for depth in range(1, EVIDENCE_DEPTH + 1)),
    *(f"log_others_{depth}" for depth in range(1, EVIDENCE_DEPTH + 1)),
    *(
        f"{place}_{name}"
        for place in ("before_2", "before_1", "token_1", "token_2", "token_3")
        for name in _CLASSES
    ),
)

POSITION_FEATURES: tuple[str, ...] = (
    "logit_next",
    "votes_logit_next",
    "logit_follows",
    "log_token_age",
    *_CLASSES,
    *(f"predecessor_{name}" for name in _CLASSES),
)

# Max tokens of a draft that the features and predictions cover.
MAX_DRAFT_LEN: int = MAX_DEPTH

assert len(FEATURE_NAMES) == NUM_DRAFT_FEATURES, "features.hpp computes other features"
assert len(POSITION_FEATURES) == NUM_POSITION_FEATURES, "features.hpp computes other features"
