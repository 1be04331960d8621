"""The predictor's inputs, known before verification. native/features.hpp computes them.

The first fourteen are the paper's (appendix B, table 9); its predictor reads no others.

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
| whitespace ... delimiter | share of the draft's tokens in each of the paper's token classes |
| logit_prob_k | log odds of the estimated probability that k tokens are accepted |
| score_6 | the score of the first six tokens |
| in_prompt, in_output | whether the match lies in the prompt, or in what the request generated |
| log_match_len, log_age | ln(1 + tokens that matched), ln(1 + tokens since the match) |
| log_occurrences, log_agreeing, share_agreeing | earlier occurrences of the context, those of \
them that the draft's first token followed, and their share |
| agreement, mean_agreement | share of the votes for the first token, mean over all tokens |
| votes_* | the same of what the votes propose, which is another draft in the paper's cache mode |
| votes_log_agreeing_len, votes_agreeing_share, votes_is_same | leading tokens in which the two \
drafts agree, their share of the draft, whether that is all of it |
| votes_logit_agreed, votes_logit_agreed_6, votes_score_agreed | what the votes say of those \
tokens: log odds that all, that six of them are accepted, and their score |
| agreed_share_k | share of the k-th latest cycle's committed tokens that the cache draft had \
right, whether or not it was the draft that was verified |
| moving_share_k | the same over the latest tokens, with a half-life of k |
| agreed_share | the same over all cycles |
| log_committed | ln(1 + tokens committed in cycles) |
| agreed_k, committed_k | tokens of the k-th latest cycle: had right, committed |
| log_run | ln(1 + tokens of the latest cycles that were had right without a miss) |
| is_place_known ... place_shift | where the match lies, against where it would if the copy of \
the cycle before went on: known, there, within 3 tokens, within 64 after, within 64 before, and \
signed ln(1 + distance) |
| aligned, in_common | shares of the 32 tokens before the draft that stand before its source \
too, at the same distance and at any (by the draft of the votes) |
| own_logit_right_k, logit_right_k | log odds that the draft's first k tokens are right, by how \
often drafts had each right after the one before it: drafts of this request, and of all of its \
namespace |
| own_logit_right_least, logit_right_least | the same of that of its first six tokens that is \
least probably right |
| log_since_* | ln(1 + tokens behind the text's latest line break, punctuation, and bracket or \
delimiter), of all of them where there is none |
| covers_line, exceeds_line, log_beyond_line | whether the match, of at most 32 tokens by votes, \
has all tokens behind the line break, whether more, and ln(1 + how many more) |
| latest_* | share of the output's latest 64 tokens in each token class |
| log_first_* | ln(1 + tokens of the draft before its first line break, punctuation, bracket or \
delimiter, and digit), of 128 where it has none |
| logit_other_k, log_others_k | where the votes go on with their draft's k-th token: log odds of \
the estimated probability that the likeliest other one follows if all before it is right, and \
ln(1 + others with votes) |
| before_2_*, before_1_*, token_k_* | whether the two tokens before the draft, and its first \
three, are in each token class |

The latest cycles of recent_* are the request's last `history_window` ones. One that verified only \
a draft's first tokens, and had all of them accepted, does not say how right the draft was and \
counts as one that verified none (docs/payoff.md, "Which rows it learns from").

Each token of the draft has inputs of its own, POSITION_FEATURES: the log odds, divided by four, \
that it is accepted if its predecessor is, by the draft's own probabilities, by the votes, and by \
how often it followed the two tokens before it, (followed + .3) / (did not follow + .3) at their \
latest two places in the own text; a tenth of ln(1 + tokens since the own text had it last); and \
the classes of it and of its predecessor. Only the first four tokens are looked up in the text; \
for the others these inputs are 0.

How often drafts had tokens right (native/token_outcomes.hpp): of each cycle's draft, verified or \
not, the committed tokens show which tokens were right up to the first that was not. A token after \
another counts with its own share of right ones and two of the token's after any, which has three \
of .75 beside its own; the result is kept from .01 to .99.
"""

from sglang_hvd.payoff._native import MAX_DEPTH, NUM_DRAFT_FEATURES, NUM_POSITION_FEATURES
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

PAPER_FEATURES = (
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

FEATURE_NAMES = (
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

POSITION_FEATURES = (
    "logit_next",
    "votes_logit_next",
    "logit_follows",
    "log_token_age",
    *_CLASSES,
    *(f"predecessor_{name}" for name in _CLASSES),
)

# Tokens of a draft that are looked at; none is deeper.
MAX_DRAFT_LEN: int = MAX_DEPTH

assert len(FEATURE_NAMES) == NUM_DRAFT_FEATURES, "features.hpp computes other features"
assert len(POSITION_FEATURES) == NUM_POSITION_FEATURES, "features.hpp computes other features"
