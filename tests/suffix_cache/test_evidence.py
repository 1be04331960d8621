"""What the texts know of a draft beside its matches, against a search through all of them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import EVIDENCE, EVIDENCE_DEPTH, MATCH_COLUMNS, DraftBatch

NEVER_SEEN = 65536
END = -1
OTHERS = tuple(name for name in EVIDENCE if "other" in name)
# Neither they nor their pairs share a bucket of the smallest index: what is in another's bucket is
# passed over, and counts as one of the places looked at.
TOKENS = st.sampled_from((1, 2, 14))


def propose(cache: SuffixCache, rid: str, max_tokens: int) -> tuple[list[int], dict[str, float]]:
    """The draft of a request, its match and its evidence."""
    batch = DraftBatch.of_size(1, 64)
    cache.propose_into(batch, [rid], np.array([max_tokens], np.int32), with_evidence=True)
    values = dict(zip(MATCH_COLUMNS, batch.matches[0].tolist(), strict=True))
    values |= zip(EVIDENCE, batch.evidence[0].tolist(), strict=True)
    if values["agreement"]:  # votes made the draft
        check_others(batch, values)
    else:
        assert not any(values[name] for name in OTHERS)
    return batch.token_ids[0, : batch.num_nodes[0]].tolist(), values


def check_others(batch: DraftBatch, values: dict[str, float]) -> None:
    """What the votes of a chain say beside it fits what they say of it."""
    num, before = int(batch.num_nodes[0]), 1.0
    for depth in range(1, EVIDENCE_DEPTH + 1):
        num_others, other = values[f"num_others_{depth}"], values[f"other_{depth}"]
        assert (num_others > 0) == (other > 0)
        if depth > num:
            assert not num_others
            continue
        prob = float(batch.probs[0, depth - 1])
        assert other <= prob / before * (1 + 1e-6)
        assert not other or prob / before + other < 1
        before = prob
    share = values["agreement"]
    assert (values["num_others_1"] > 0) == (share < 1)
    if values["num_others_1"] == 1:  # it has the other votes
        rest = float(batch.probs[0, 0]) * (1 / share - 1)
        assert values["other_1"] == pytest.approx(rest, rel=1e-4, abs=1e-6)


def followers(text: Sequence[int], pair: Sequence[int], token: int) -> tuple[int, int]:
    """How many of the latest two places of the pair there are, and how many the token follows."""
    if END in pair:
        return 0, 0
    nexts = [text[end] for end in range(2, len(text)) if list(text[end - 2 : end]) == list(pair)]
    return len(nexts[-2:]), nexts[-2:].count(token)


def expected(
    own: list[int], shared: list[int], draft: list[int], values: dict[str, float]
) -> dict[str, float]:
    evidence = {name: 0.0 for name in EVIDENCE if name not in OTHERS}
    if not draft:
        return evidence
    before = [END, END, *own][-2:]
    for depth, token in enumerate(draft[:EVIDENCE_DEPTH], start=1):
        num_seen, num_followed = followers(own, before, token)
        evidence[f"num_seen_{depth}"] = num_seen
        evidence[f"num_followed_{depth}"] = num_followed
        age = own[::-1].index(token) if token in own else NEVER_SEEN
        evidence[f"age_{depth}"] = age
        before = [before[1], token]
    text = shared if values["origin"] == 2 else own
    source = text[: len(text) - int(values["age"])]
    here, there = own[-32:], source[-32:]
    num = min(len(here), len(there))
    pairs = zip(here[-num:], there[-num:], strict=True)
    evidence["aligned"] = sum(a == b for a, b in pairs) / 32
    evidence["in_common"] = sum(token in there[-num:] for token in here[-num:]) / 32
    return evidence


@given(
    st.lists(st.lists(TOKENS, min_size=1, max_size=20), max_size=3),
    st.lists(TOKENS, max_size=50),
    st.lists(TOKENS, max_size=20),
    st.integers(0, 12),
)
@settings(max_examples=300, deadline=None)
def test_evidence_is_what_a_search_finds(
    outputs: list[list[int]], prompt: list[int], output: list[int], max_tokens: int
) -> None:
    cache = SuffixCache(background=False)
    shared: list[int] = []
    for rid, kept in enumerate(outputs):
        cache.start(rid, [])
        cache.commit([rid], [kept])
        cache.finish(rid, keep=True)
        shared += [*kept, END]
    cache.start("a", prompt)
    cache.commit(["a"], [output])
    draft, values = propose(cache, "a", max_tokens)
    wanted = expected([*prompt, *output], shared, draft, values)
    assert {name: values[name] for name in EVIDENCE if name not in OTHERS} == wanted


@given(st.integers(0, 2**32 - 1), st.integers(2, 400))
@settings(max_examples=40, deadline=None)
def test_evidence_of_long_texts_lies_within_what_a_search_finds(seed: int, vocab: int) -> None:
    # Of several blocks, with other tokens in each bucket. Drafts may come from the shared text,
    # which has lost outputs.
    random = np.random.default_rng(seed)

    def text(most: int) -> list[int]:
        phrases = [random.integers(1, vocab + 1, 9).tolist() for _ in range(20)]
        num = int(random.integers(2, most // 9))
        return [token for i in random.integers(0, 20, num) for token in phrases[i]]

    cache = SuffixCache(background=False, shared_cache_tokens=2500)
    for rid in range(4):
        cache.start(rid, [])
        cache.commit([rid], [text(1500)])
        cache.finish(rid, keep=True)
    own = text(3000)
    cache.start("a", own)
    again = own[40:60]  # of a short text fewer, or none
    own += again
    cache.commit(["a"], [again])
    draft, values = propose(cache, "a", 12)
    before = own[-2:]
    for depth, token in enumerate(draft[:EVIDENCE_DEPTH], start=1):
        num_seen, num_followed = values[f"num_seen_{depth}"], values[f"num_followed_{depth}"]
        nexts = [
            following
            for pair, following in zip(pairwise(own), own[2:], strict=False)
            if list(pair) == before
        ]
        assert 0 <= num_followed <= num_seen <= min(2, len(nexts))
        assert num_followed <= nexts.count(token)
        assert num_seen - num_followed <= len(nexts) - nexts.count(token)
        age = own[::-1].index(token) if token in own else NEVER_SEEN
        assert values[f"age_{depth}"] in (age, NEVER_SEEN)
        if age < 4:  # fewer tokens came since than places in a bucket are looked at
            assert values[f"age_{depth}"] == age
        before = [before[1], token]
    assert values["aligned"] <= values["in_common"] <= 1


def test_what_a_copy_does_not_share_with_its_source_shows() -> None:
    cache = SuffixCache(background=False)
    line = list(range(100, 120))
    cache.start("a", [*line, 7, 8, 9, 10, 11, *range(100, 115), 99, *range(116, 120), 7, 8])
    draft, values = propose(cache, "a", 8)
    assert draft[:3] == [9, 10, 11]
    assert values["aligned"] == 21 / 32  # 7 and 8, 116 to 119, and what stands before 99
    assert values["in_common"] == 21 / 32
    assert values["num_seen_1"] == values["num_followed_1"] == 1


def test_what_else_has_votes_is_told_of_the_token_where_they_differ() -> None:
    cache = SuffixCache(background=False)
    cache.start("a", [1, 2, 3, 4, 7, 1, 2, 3, 5, 8, 1, 2, 3, 4, 9, 1, 2])
    draft, values = propose(cache, "a", 4)
    assert draft[:2] == [3, 4]
    assert [values[f"num_others_{depth}"] for depth in range(1, EVIDENCE_DEPTH + 1)] == [0, 1, 1, 0]
    paths = branches(cache, "a")
    assert values["other_2"] == pytest.approx(paths[5, 2] / paths[3, 1], rel=1e-5)


def test_of_several_others_the_likeliest_counts() -> None:
    cache = SuffixCache(background=False)
    text = [1, 2, 4, 11, 1, 2, 5, 12, 1, 2, 5, 13, 1, 2, 6, 14, 1, 2, 6, 15, 1, 2]
    cache.start("a", text)
    draft, values = propose(cache, "a", 4)
    paths = branches(cache, "a")
    [likeliest] = {5, 6} - {draft[0]}
    assert values["num_others_1"] == 2
    assert values["other_1"] == pytest.approx(paths[likeliest, 1], rel=1e-5)
    assert paths[likeliest, 1] > paths[4, 1]


def branches(cache: SuffixCache, rid: str) -> dict[tuple[int, int], float]:
    """Probabilities of a tree's nodes by token and depth. It is so small that it is made of the
    votes of the chain alone."""
    tree = DraftBatch.of_size(1, 8)
    cache.propose_into(tree, [rid], np.array([8], np.int32), is_tree=True)
    nodes = zip(tree.token_ids[0], tree.depths[0], tree.probs[0], strict=True)
    return {(int(token), int(depth)): float(prob) for token, depth, prob in nodes}


@pytest.mark.parametrize(("between", "age"), [([3] * 3, 5), ([3] * 4, NEVER_SEEN), ([6] * 4, 6)])
def test_a_token_behind_four_others_of_its_bucket_counts_as_never_seen(
    between: list[int], age: int
) -> None:
    # 1 and 3 share one of the smallest index's buckets; 2, 4 and 6 are in another.
    cache = SuffixCache(background=False)
    cache.start("a", [2, 4, 1, *between, 2, 4])
    draft, values = propose(cache, "a", 1)
    assert draft == [1]
    assert values["age_1"] == age


def test_a_draft_of_the_paper_has_evidence_of_its_tokens() -> None:
    cache = SuffixCache.as_in_paper()
    cache.start("a", [5, 6, 7, 8, 1, 5, 6])
    draft, values = propose(cache, "a", 8)
    assert draft == [7, 8]
    assert values["num_followed_2"] == 1
    assert values["age_2"] == 3
    assert values["aligned"] == 0
    assert not any(values[name] for name in OTHERS)
    batch = DraftBatch.of_size(1, 64)
    limits = np.array([8], np.int32)
    cache.propose_into(batch, ["a"], limits, by_votes=True, with_evidence=True)
    values = dict(zip(EVIDENCE, batch.evidence[0].tolist(), strict=True))
    assert values["aligned"] == 2 / 32
    assert values["age_2"] == 3


def test_in_the_mode_of_the_paper_the_votes_alone_know_what_else_has_any() -> None:
    cache = SuffixCache.as_in_paper()
    cache.start("a", [1, 2, 3, 7, 1, 2, 4, 8, 1, 2])
    batch = DraftBatch.of_size(1, 8)
    limits = np.array([8], np.int32)
    cache.propose_into(batch, ["a"], limits, by_votes=True, with_evidence=True)
    assert batch.evidence[0, EVIDENCE.index("num_others_1")] == 1
    propose(cache, "a", 8)


def test_evidence_that_was_not_asked_for_is_not_written() -> None:
    cache = SuffixCache(background=False)
    cache.start("a", [1, 2, 1])
    batch = DraftBatch.of_size(1, 8)
    batch.evidence[:] = 7
    cache.propose_into(batch, ["a"], np.array([8], np.int32))
    assert (batch.evidence == 7).all()
    cache.propose_into(batch, ["a"], np.array([8], np.int32), is_tree=True, with_evidence=True)
    assert not batch.evidence.any()  # a tree has none


@pytest.mark.parametrize("shape", [(2, len(EVIDENCE) + 1), (0, len(EVIDENCE))])
def test_arrays_that_do_not_fit_are_refused(shape: tuple[int, int]) -> None:
    cache = SuffixCache(background=False)
    cache.start("a", [1, 2, 1])
    batch = replace(DraftBatch.of_size(2, 8), evidence=np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="batch"):
        cache.propose_into(batch, ["a"], np.array([8], np.int32), with_evidence=True)
