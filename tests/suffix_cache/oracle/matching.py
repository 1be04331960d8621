"""The draft that a text of token sequences proposes for a context.

The rules are those of SuffixDecoding as ArcticInference 0.3.0 implements them for chains
(csrc/suffix_decoding/suffix_tree.cc: speculate, _speculate_path), token for token and score for
score. There, a suffix tree stores how often each run of tokens occurs; here, the occurrences are
looked up and counted when they are needed.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.types import TokenIds
from tests.suffix_cache.oracle.token_text import END

# Positions in a text, just after an occurrence.
_Ends = npt.NDArray[np.intp]

# Up to this many occurrences, comparing whole windows at once is faster than token by token.
_FEW_OCCURRENCES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """The best continuation found: int32[num_tokens], the match it follows, and its score."""

    token_ids: TokenIds
    match_len: int
    score: float


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How long a draft may be.

    max_tokens: longest draft by match length, from 0 (unused) to max_depth - 1.
    min_token_prob: a draft ends before the first token that is less likely.
    """

    max_tokens: tuple[int, ...]
    min_token_prob: np.float32

    @classmethod
    def of(
        cls,
        *,
        max_depth: int,
        max_draft_tokens: int,
        max_spec_factor: float,
        max_spec_offset: float,
        min_token_prob: float,
    ) -> "DraftLimits":
        """At most factor x match length + offset tokens, at most max_draft_tokens, and match and
        draft together at most max_depth."""
        factor, offset = np.float32(max_spec_factor), np.float32(max_spec_offset)
        # In single precision, with the epsilon in double, as upstream.
        by_match_len = (
            int(float(np.float32(match_len) * factor + offset) + 1e-6)
            for match_len in range(max_depth)
        )
        return cls(
            tuple(
                min(max(limit, 0), max_draft_tokens, max_depth - match_len)
                for match_len, limit in enumerate(by_match_len)
            ),
            np.float32(min_token_prob),
        )

    def at_most(self, max_tokens: int) -> "DraftLimits":
        """The same limits for drafts of at most max_tokens."""
        shorter = tuple(min(limit, max_tokens) for limit in self.max_tokens)
        return DraftLimits(shorter, self.min_token_prob)


def best_continuation(
    text: TokenIds, guard: int, context: TokenIds, limits: DraftLimits
) -> Continuation | None:
    """The continuation with the highest score over all match lengths; the longest match wins ties.

    text: int32, sequences each followed by END, after `guard` positions that are not searched.
    context: int32[num_tokens], at most guard tokens; the matches are suffixes of it.
    """
    ends = np.flatnonzero(text[guard:-1] == context[-1]) + (guard + 1)
    match_lens = _match_lens(text, ends, context)
    best: Continuation | None = None
    for room, shortest, longest in _by_promise(match_lens, limits):
        # All match lengths in this range have the same occurrences, so the same continuation.
        if room < (best.score if best else 1):
            break  # a token adds at most 1 to the score
        token_ids, probs = _most_likely_path(
            text, ends[match_lens >= longest], room, limits.min_token_prob
        )
        if not token_ids:
            continue
        scores = np.cumsum(probs, dtype=np.float32).tolist()
        for match_len in range(shortest, longest + 1):
            num_tokens = min(limits.max_tokens[match_len], len(token_ids))
            if num_tokens <= 0:
                continue
            score = scores[num_tokens - 1]
            if best is None or (score, match_len) > (best.score, best.match_len):
                draft_ids = np.array(token_ids[:num_tokens], dtype=np.int32)
                best = Continuation(draft_ids, match_len, score)
    return best


def _match_lens(text: TokenIds, ends: _Ends, context: TokenIds) -> npt.NDArray[np.intp]:
    """How many tokens of the context, counted from its end, match before each position."""
    match_lens = np.ones(len(ends), dtype=np.intp)
    matching = np.arange(len(ends))
    length = 1
    while length < len(context) and len(matching) > _FEW_OCCURRENCES:
        same = text[ends[matching] - 1 - length] == context[-1 - length]
        matching = matching[same]
        length += 1
        match_lens[matching] = length
    if len(matching):
        window = np.arange(1, len(context) + 1)
        differs = text[ends[matching, None] - window] != context[::-1]
        first_difference = differs.argmax(axis=1)
        match_lens[matching] = np.where(differs.any(axis=1), first_difference, len(context))
    return match_lens


def _by_promise(
    match_lens: npt.NDArray[np.intp], limits: DraftLimits
) -> list[tuple[int, int, int]]:
    """(longest draft allowed, shortest, longest match length) for each range of match lengths
    with the same occurrences; the longest draft first."""
    ranges = []
    shortest = 1
    for longest in np.flatnonzero(np.bincount(match_lens)).tolist():
        ranges.append((max(limits.max_tokens[shortest : longest + 1]), shortest, longest))
        shortest = longest + 1
    return sorted(ranges, reverse=True)


def _most_likely_path(
    text: TokenIds, ends: _Ends, max_tokens: int, min_token_prob: np.float32
) -> tuple[list[int], list[np.float32]]:
    """Follows the most frequent next token from the given occurrences: tokens and probabilities.

    A token's probability is its predecessor's times the share of the occurrences so far that it
    follows. Occurrences at the end of their sequence count among them: the context itself too.
    """
    token_ids: list[int] = []
    probs: list[np.float32] = []
    prob = np.float32(1)
    while len(token_ids) < max_tokens:
        width = max_tokens - len(token_ids) if len(ends) <= _FEW_OCCURRENCES else 1
        # Beyond the text there is its last END; what follows an END is never looked at.
        following = text.take(ends[:, None] + np.arange(width), mode="clip")
        agree = (following == following[0]).all(axis=0) & (following[0] != END)
        num_agreed = width if agree.all() else int(agree.argmin())
        token_ids += following[0, :num_agreed].tolist()
        probs += [prob] * num_agreed
        if num_agreed == width:
            ends = ends + width
            continue
        next_tokens = following[:, num_agreed]
        token = _most_frequent(next_tokens[next_tokens != END].tolist())
        if token is None:
            break
        follows = next_tokens == token
        prob *= np.float32(np.count_nonzero(follows)) / np.float32(len(ends))
        if prob < min_token_prob:
            break
        token_ids.append(token)
        probs.append(prob)
        ends = ends[follows] + (num_agreed + 1)
    return token_ids, probs


def _most_frequent(tokens: list[int]) -> int | None:
    """The most frequent token, None of none; ties as upstream, see _first_sibling."""
    if not tokens:
        return None
    counts = Counter(tokens)
    highest = max(counts.values())
    leaders = [token for token, count in counts.items() if count == highest]
    return leaders[0] if len(leaders) == 1 else _first_sibling(tokens)


def _first_sibling(tokens: list[int]) -> int:
    """The first child of a node of ArcticInference's suffix tree after these insertions.

    Children stand in order of falling count. One that reaches a count goes behind the others
    with that count, except that the first of its old group goes before them
    (suffix_tree.cc: _increment_count).
    """
    counts: dict[int, int] = {}
    groups: list[OrderedDict[int, None]] = [OrderedDict()]  # children by count, in order
    for token in tokens:
        count = counts.get(token, 0)
        counts[token] = count + 1
        is_first = count > 0 and next(iter(groups[count])) == token
        if count > 0:
            del groups[count][token]
        if count + 1 == len(groups):
            groups.append(OrderedDict())
        groups[count + 1][token] = None
        if is_first:
            groups[count + 1].move_to_end(token, last=False)
    return next(iter(groups[-1]))
