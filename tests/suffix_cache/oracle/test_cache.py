"""The suffix cache against a trie that counts every run of tokens as it comes."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_hvd.replay.core.single_cycles import CacheDraft
from sglang_hvd.types import TokenIds
from tests.suffix_cache.oracle.cache import OracleCache, OracleStats


def ids(*token_ids: int) -> TokenIds:
    return np.array(token_ids, dtype=np.int32)


def as_tuple(draft: CacheDraft | None) -> tuple[list[int], int, float, str] | None:
    if draft is None:
        return None
    return draft.token_ids.tolist(), draft.match_len, draft.score, draft.source


@dataclass
class Node:
    count: int = 0
    token: int = -1
    children: list["Node"] = field(default_factory=list)

    def child(self, token: int) -> "Node | None":
        return next((child for child in self.children if child.token == token), None)


class Trie:
    """SuffixDecoding's tree without its compression: a node per run of up to max_depth tokens."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.root = Node()

    def add(self, sequence: list[int]) -> None:
        active: list[Node] = []
        for token in sequence:
            active = [*active, self.root][-self.max_depth :]
            self.root.count += 1
            active = [self._step(node, token) for node in active]

    def _step(self, node: Node, token: int) -> Node:
        child = node.child(token)
        if child is None:
            child = Node(1, token)
            node.children.append(child)
            return child
        # suffix_tree.cc, _increment_count: pass the whole group of the previous sibling.
        siblings = node.children
        place = siblings.index(child)
        if place > 0 and siblings[place - 1].count <= child.count + 1:
            group = siblings[place - 1].count
            target = next(i for i, sibling in enumerate(siblings) if sibling.count == group)
            siblings.insert(target, siblings.pop(place))
        child.count += 1
        return child

    def draft(
        self,
        context: list[int],
        *,
        max_tokens: int,
        factor: float,
        offset: float,
        min_token_prob: float,
    ) -> tuple[list[int], int, np.float32]:
        """suffix_tree.cc, speculate: (token ids, match length, score)."""
        best: tuple[list[int], int, np.float32] = ([], 0, np.float32(0))
        for match_len in range(1, len(context)):
            node: Node | None = self.root
            for token in context[-match_len:]:
                node = node.child(token) if node else None
            if node is None:
                break
            room = int(
                float(np.float32(match_len) * np.float32(factor) + np.float32(offset)) + 1e-6
            )
            draft, score, prob = [], np.float32(0), np.float32(1)
            while len(draft) < min(room, max_tokens) and node.children:
                prob *= np.float32(node.children[0].count) / np.float32(node.count)
                if prob < np.float32(min_token_prob):
                    break
                node = node.children[0]
                draft.append(node.token)
                score += prob
            if score >= best[2]:
                best = (draft, match_len, score)
        return best


@dataclass
class Settings:
    max_depth: int
    max_draft_tokens: int
    max_spec_factor: float
    max_spec_offset: float
    min_token_prob: float
    shared_cache_tokens: int


class Oracle:
    """The cache's contract on plain lists, with tries built anew for every proposal."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.shared: list[list[int]] = []
        self.requests: dict[str, tuple[list[int], list[int]]] = {}  # prompt, output

    def finish(self, rid: str, keep: bool, output: list[int] | None) -> None:
        _, committed = self.requests.pop(rid)
        kept = committed if output is None else output
        if not keep or not 0 < len(kept) <= self.settings.shared_cache_tokens:
            return
        self.shared.append(kept)
        while sum(map(len, self.shared)) > self.settings.shared_cache_tokens:
            self.shared.pop(0)

    def propose(self, rid: str, max_tokens: int) -> tuple[list[int], int, float, str] | None:
        prompt, output = self.requests[rid]
        own, shared = Trie(self.settings.max_depth), Trie(self.settings.max_depth)
        own.add(prompt + output)
        for sequence in self.shared:
            shared.add(sequence)
        context = (prompt + output)[-self.settings.max_depth :]
        from_own, from_shared = (
            trie.draft(
                context,
                max_tokens=min(max_tokens, self.settings.max_draft_tokens),
                factor=self.settings.max_spec_factor,
                offset=self.settings.max_spec_offset,
                min_token_prob=self.settings.min_token_prob,
            )
            for trie in (own, shared)
        )
        source = "request" if from_own[2] >= from_shared[2] else "shared"
        token_ids, match_len, score = from_own if source == "request" else from_shared
        return (token_ids, match_len, float(score), source) if token_ids else None


# Few distinct tokens, so that matches, ties and overlaps are the rule.
TOKENS = st.lists(st.integers(0, 2), max_size=14)
RIDS = st.sampled_from(["a", "b", "c"])
SETTINGS = st.builds(
    Settings,
    max_depth=st.sampled_from([2, 3, 5, 8, 64]),
    max_draft_tokens=st.sampled_from([1, 4, 64]),
    max_spec_factor=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    max_spec_offset=st.sampled_from([-1.0, 0.0, 1.5]),
    min_token_prob=st.sampled_from([0.0, 0.1, 0.4]),
    shared_cache_tokens=st.sampled_from([0, 5, 30, 1000]),
)


class CacheLife(RuleBasedStateMachine):
    """Any order of calls gives the oracle's drafts."""

    @initialize(chosen=SETTINGS)
    def create(self, chosen: Settings) -> None:
        self.oracle = Oracle(chosen)
        self.cache = OracleCache(
            max_depth=chosen.max_depth,
            max_draft_tokens=chosen.max_draft_tokens,
            max_spec_factor=chosen.max_spec_factor,
            max_spec_offset=chosen.max_spec_offset,
            min_token_prob=chosen.min_token_prob,
            shared_cache_tokens=chosen.shared_cache_tokens,
        )

    @rule(rid=RIDS, prompt=TOKENS)
    def start(self, rid: str, prompt: list[int]) -> None:
        if rid in self.oracle.requests:
            with pytest.raises(ValueError, match="already active"):
                self.cache.start(rid, prompt)
            return
        self.cache.start(rid, prompt)
        self.oracle.requests[rid] = (prompt, [])

    @precondition(lambda self: self.oracle.requests)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        rids = data.draw(st.sets(st.sampled_from(sorted(self.oracle.requests))).map(sorted))
        outputs = [data.draw(TOKENS) for _ in rids]
        self.cache.commit(rids, [ids(*output) for output in outputs])
        for rid, output in zip(rids, outputs, strict=True):
            self.oracle.requests[rid][1].extend(output)

    @precondition(lambda self: self.oracle.requests)
    @rule(data=st.data(), keep=st.booleans(), given_output=st.none() | TOKENS)
    def finish(self, data: st.DataObject, keep: bool, given_output: list[int] | None) -> None:
        rid = data.draw(st.sampled_from(sorted(self.oracle.requests)))
        self.cache.finish(rid, keep=keep, output_ids=given_output)
        self.oracle.finish(rid, keep, given_output)

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        self.oracle.shared.clear()

    @precondition(lambda self: self.oracle.requests)
    @rule(data=st.data())
    def propose(self, data: st.DataObject) -> None:
        rids = sorted(self.oracle.requests)
        limits = [data.draw(st.sampled_from([0, 1, 3, 64])) for _ in rids]
        drafts = self.cache.propose(rids, limits)
        assert [as_tuple(draft) for draft in drafts] == [
            self.oracle.propose(rid, limit) for rid, limit in zip(rids, limits, strict=True)
        ]

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.stats() == OracleStats(
            num_requests=len(self.oracle.requests),
            num_request_tokens=sum(len(p) + len(o) for p, o in self.oracle.requests.values()),
            num_shared_requests=len(self.oracle.shared),
            num_shared_tokens=sum(map(len, self.oracle.shared)),
        )


CacheLife.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestCacheLife = CacheLife.TestCase


@pytest.mark.parametrize("vocab", [1, 2, 5])
def test_hundreds_of_occurrences_are_counted_like_a_few(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    chosen = Settings(8, 64, 4.0, 0.0, 0.1, 1000)
    oracle, cache = Oracle(chosen), OracleCache(max_depth=8, max_spec_factor=4.0)
    for rid in ("a", "b"):
        prompt, output = random.integers(0, vocab, (2, 400), dtype=np.int32)
        cache.start(rid, prompt)
        cache.commit([rid], [output])
        oracle.requests[rid] = (prompt.tolist(), output.tolist())
        assert as_tuple(cache.propose([rid], 64)[0]) == oracle.propose(rid, 64)
        cache.finish(rid, keep=True)
        oracle.finish(rid, True, None)


@given(TOKENS, st.lists(TOKENS, max_size=4))
@settings(max_examples=60, deadline=None)
def test_tokens_committed_in_pieces_or_at_once_give_the_same_drafts(
    prompt: list[int], pieces: list[list[int]]
) -> None:
    cache = OracleCache()
    cache.start("pieces", prompt)
    for piece in pieces:
        cache.commit(["pieces"], [piece])
    cache.start("at once", prompt + [token for piece in pieces for token in piece])
    in_pieces, at_once = cache.propose(["pieces", "at once"], 64)
    assert as_tuple(in_pieces) == as_tuple(at_once)


@pytest.fixture
def cache() -> OracleCache:
    return OracleCache(shared_cache_tokens=8)


def test_a_request_matches_its_own_prompt_and_output(cache: OracleCache) -> None:
    cache.start("r", [1, 2, 3, 4])
    cache.commit(["r"], [ids(9, 1, 2)])
    assert as_tuple(cache.propose(["r"], 64)[0]) == ([3, 4], 2, 1.0, "request")


def test_a_finished_request_stays_in_the_shared_cache(cache: OracleCache) -> None:
    cache.start("first", [7])
    cache.commit(["first"], [ids(1, 2, 3, 4)])
    cache.finish("first", keep=True)
    cache.start("second", [8, 1, 2])
    assert as_tuple(cache.propose(["second"], 64)[0]) == ([3, 4], 2, 2.0, "shared")


def test_prompts_are_never_shared(cache: OracleCache) -> None:
    cache.start("first", [1, 2, 3, 4])
    cache.commit(["first"], [ids(9)])
    cache.finish("first", keep=True)
    cache.start("second", [8, 1, 2])
    assert cache.propose(["second"], 64) == [None]


def test_a_running_requests_output_is_not_shared(cache: OracleCache) -> None:
    cache.start("first", [7])
    cache.commit(["first"], [ids(1, 2, 3, 4)])
    cache.start("second", [8, 1, 2])
    assert cache.propose(["second"], 64) == [None]


def test_a_request_that_is_not_kept_leaves_nothing_behind(cache: OracleCache) -> None:
    cache.start("first", [7])
    cache.commit(["first"], [ids(1, 2, 3, 4)])
    cache.finish("first", keep=False)
    assert cache.stats() == OracleStats(0, 0, 0, 0)


def test_the_kept_output_may_differ_from_the_committed_tokens(cache: OracleCache) -> None:
    cache.start("first", [7])
    cache.commit(["first"], [ids(1, 2, 3, 4)])
    cache.finish("first", keep=True, output_ids=[1, 2, 3])
    assert cache.stats().num_shared_tokens == 3


def test_the_oldest_output_leaves_first(cache: OracleCache) -> None:
    for rid in range(3):
        cache.start(rid, [])
        cache.finish(rid, keep=True, output_ids=[10 * rid, 10 * rid + 1, 10 * rid + 2])
    assert cache.stats().num_shared_requests == 2
    cache.start("r", [5, 0])
    cache.start("s", [5, 10])
    gone, kept = cache.propose(["r", "s"], 64)
    assert gone is None
    assert as_tuple(kept) == ([11], 1, 1.0, "shared")


def test_an_output_larger_than_the_budget_is_not_kept_and_evicts_nothing(
    cache: OracleCache,
) -> None:
    cache.start("small", [])
    cache.finish("small", keep=True, output_ids=[1, 2])
    cache.start("large", [])
    cache.finish("large", keep=True, output_ids=list(range(9)))
    assert cache.stats().num_shared_tokens == 2


def test_without_a_budget_nothing_is_shared() -> None:
    cache = OracleCache(shared_cache_tokens=0)
    cache.start("r", [])
    cache.finish("r", keep=True, output_ids=[1, 2])
    assert cache.stats().num_shared_requests == 0


def test_flush_forgets_finished_requests_and_keeps_running_ones(cache: OracleCache) -> None:
    cache.start("done", [])
    cache.finish("done", keep=True, output_ids=[1, 2, 3])
    cache.start("r", [1, 5, 6, 1])
    cache.flush()
    assert as_tuple(cache.propose(["r"], 64)[0]) == ([5], 1, 0.5, "request")
    assert cache.stats().num_shared_tokens == 0


@pytest.mark.parametrize("prompt", [[], [1]])
def test_a_prompt_too_short_to_match_gets_no_draft(cache: OracleCache, prompt: list[int]) -> None:
    cache.start("r", prompt)
    assert cache.propose(["r"], 64) == [None]
    cache.commit(["r"], [ids(1)])
    cache.commit(["r"], [ids(2)])
    assert cache.propose(["r"], 64) == [None]


def test_the_largest_token_id_is_a_token_like_any_other(cache: OracleCache) -> None:
    largest = 2**31 - 1
    cache.start("r", [0, largest, 5, 0, largest])
    assert as_tuple(cache.propose(["r"], 64)[0]) == ([5, 0], 2, 1.0, "request")


def test_a_draft_cannot_be_written_to(cache: OracleCache) -> None:
    cache.start("r", [1, 2, 1])
    [draft] = cache.propose(["r"], 64)
    assert draft is not None
    with pytest.raises(ValueError, match="read-only"):
        draft.token_ids[0] = 9


def test_drafts_outlive_their_request(cache: OracleCache) -> None:
    cache.start("r", [1, 2, 1])
    [draft] = cache.propose(["r"], 64)
    cache.commit(["r"], [ids(*range(1000))])
    cache.finish("r", keep=True)
    assert as_tuple(draft) == ([2], 1, 0.5, "request")


def test_a_rid_may_be_used_again_after_finish(cache: OracleCache) -> None:
    cache.start("r", [1, 2, 1])
    cache.finish("r", keep=False)
    cache.start("r", [3, 4, 1])
    assert cache.propose(["r"], 64) == [None]


def test_a_request_that_is_not_active_is_named(cache: OracleCache) -> None:
    for call in (
        lambda: cache.propose(["r"], 4),
        lambda: cache.commit(["r"], [ids(1)]),
        lambda: cache.finish("r", keep=True),
    ):
        with pytest.raises(KeyError, match="request 'r' is not active"):
            call()


def test_starting_an_active_request_is_refused_and_changes_nothing(cache: OracleCache) -> None:
    cache.start("r", [1, 2, 1])
    with pytest.raises(ValueError, match="request 'r' is already active"):
        cache.start("r", [3])
    assert cache.stats().num_request_tokens == 3


def test_a_commit_with_one_bad_entry_changes_no_request(cache: OracleCache) -> None:
    cache.start("r", [1])
    cache.start("s", [1])
    with pytest.raises(ValueError, match="negative"):
        cache.commit(["r", "s"], [ids(5), ids(-5)])
    with pytest.raises(KeyError):
        cache.commit(["r", "unknown"], [ids(5), ids(5)])
    with pytest.raises(ValueError, match="only once"):
        cache.commit(["r", "r"], [ids(5), ids(5)])
    with pytest.raises(ValueError, match="shorter"):
        cache.commit(["r", "s"], [ids(5)])
    assert cache.stats().num_request_tokens == 2


def test_a_bad_output_leaves_the_request_active(cache: OracleCache) -> None:
    cache.start("r", [1])
    with pytest.raises(ValueError, match="from 0 to"):
        cache.finish("r", keep=True, output_ids=[-1])
    assert cache.num_requests == 1
