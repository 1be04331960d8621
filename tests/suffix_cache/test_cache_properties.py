"""The native cache in paper mode against the Python cache, operation by operation."""

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import DraftBatch
from tests.suffix_cache.oracle.cache import OracleCache
from tests.suffix_cache.proposed_drafts import propose

# Few tokens make long matches and ties likely; the extreme shows that int32 is kept whole.
TOKEN_IDS = st.sampled_from([0, 1, 2, 2**31 - 1])
TEXTS = st.lists(TOKEN_IDS, max_size=40)
RIDS = st.sampled_from(["a", "b", "c", 7])


class PaperModeEqualsTheOracle(RuleBasedStateMachine):
    @initialize(
        max_depth=st.integers(2, 24),
        max_draft_tokens=st.integers(0, 16),
        max_spec_factor=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        max_spec_offset=st.sampled_from([-1.0, 0.0, 2.0]),
        min_token_prob=st.sampled_from([0.0, 0.1, 0.34, 1.0]),
        shared_cache_tokens=st.integers(0, 120),
    )
    def build(self, **limits: float) -> None:
        self.oracle = OracleCache(**limits)
        self.native = SuffixCache.as_in_paper(**limits)
        self.active: set[object] = set()

    @rule(rid=RIDS, prompt=TEXTS, repeats=st.integers(1, 40))
    def start(self, rid: object, prompt: list[int], repeats: int) -> None:
        if rid not in self.active:
            self.oracle.start(rid, prompt * repeats)  # long enough for several blocks
            self.native.start(rid, prompt * repeats)
            self.active.add(rid)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        rids = data.draw(st.lists(st.sampled_from(sorted(self.active, key=str)), unique=True))
        texts = [data.draw(TEXTS) for _ in rids]
        self.oracle.commit(rids, texts)
        self.native.commit(rids, texts)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.active, key=str)))
        keep = data.draw(st.booleans())
        output_ids = data.draw(st.none() | TEXTS)
        self.oracle.finish(rid, keep=keep, output_ids=output_ids)
        self.native.finish(rid, keep=keep, output_ids=output_ids)
        self.active.remove(rid)

    @rule()
    def flush(self) -> None:
        self.oracle.flush()
        self.native.flush()

    @rule(max_tokens=st.integers(0, 20))
    def propose(self, max_tokens: int) -> None:
        rids = sorted(self.active, key=str)
        want = self.oracle.propose(rids, max_tokens)
        got = propose(self.native, rids, max_tokens)
        assert [_values(draft) for draft in got] == [_values(draft) for draft in want]

    @invariant()
    def structures_are_sound(self) -> None:
        self.native.check()
        want, got = self.oracle.stats(), self.native.stats()
        assert got.num_requests == want.num_requests
        assert got.num_shared_tokens == want.num_shared_tokens
        assert got.num_shared_requests == want.num_shared_requests


def _values(draft: object) -> object:
    if draft is None:
        return None
    return draft.token_ids.tolist(), draft.match_len, draft.score, draft.source


class DefaultDraftsAreSound(RuleBasedStateMachine):
    """What must hold for any draft, chain or tree, after any operations."""

    @initialize(
        background=st.booleans(),
        shared_cache_tokens=st.integers(0, 150),
        namespace_tokens=st.integers(0, 150),
    )
    def build(self, background: bool, shared_cache_tokens: int, namespace_tokens: int) -> None:
        self.cache = SuffixCache(
            background=background,
            shared_cache_tokens=shared_cache_tokens,
            namespace_tokens=namespace_tokens,
        )
        self.budgets = (shared_cache_tokens, namespace_tokens)
        self.own: dict[object, list[int]] = {}
        self.prompt_len: dict[object, int] = {}
        self.namespace: dict[object, str] = {}
        self.kept: list[tuple[str, list[int]]] = []  # namespace and output, the oldest first

    @rule(rid=RIDS, prompt=TEXTS, repeats=st.integers(1, 60), side=st.sampled_from("lr"))
    def start(self, rid: object, prompt: list[int], repeats: int, side: str) -> None:
        if rid in self.own:
            return
        # Tokens tell the namespace: what one proposes can have come from no other.
        self.namespace[rid] = {"l": "left", "r": "right"}[side]
        self.own[rid] = self._marked(rid, prompt * repeats)
        self.prompt_len[rid] = len(self.own[rid])
        self.cache.start(rid, self.own[rid], self.namespace[rid])

    def _marked(self, rid: object, token_ids: list[int]) -> list[int]:
        side = self.namespace[rid]
        return [token // 2 * 2 + (side == "left") for token in token_ids]

    @precondition(lambda self: self.own)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        rids = data.draw(st.lists(st.sampled_from(sorted(self.own, key=str)), unique=True))
        rows = [self._marked(rid, data.draw(TEXTS)) for rid in rids]
        width = max(map(len, rows), default=0)
        token_ids = np.array([row + [-5] * (width - len(row)) for row in rows], np.int32)
        lengths = np.array([len(row) for row in rows], np.int32)
        self.cache.commit(rids, token_ids.reshape(len(rids), width), lengths)
        for rid, row in zip(rids, rows, strict=True):
            self.own[rid] += row

    @precondition(lambda self: self.own)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data: st.DataObject, keep: bool) -> None:
        rid = data.draw(st.sampled_from(sorted(self.own, key=str)))
        self.cache.finish(rid, keep=keep)
        output = self.own.pop(rid)[self.prompt_len.pop(rid) :]
        if keep and 0 < len(output) <= min(self.budgets):
            self.kept.append((self.namespace[rid], output))
            self._evict()

    def _evict(self) -> None:
        for side in ("left", "right"):
            while self._num_kept(side) > self.budgets[1]:
                self.kept.remove(next(kept for kept in self.kept if kept[0] == side))
        while self._num_kept("left") + self._num_kept("right") > self.budgets[0]:
            del self.kept[0]

    def _num_kept(self, side: str) -> int:
        return sum(len(output) for namespace, output in self.kept if namespace == side)

    @rule(budgets=st.tuples(st.integers(0, 150), st.integers(0, 150)))
    def resize(self, budgets: tuple[int, int]) -> None:
        self.cache.resize(*budgets)
        self.budgets = budgets
        self._evict()

    @rule(namespace=st.sampled_from(["left", "right", None]))
    def flush(self, namespace: str | None) -> None:
        self.cache.flush(namespace)
        self.kept = [kept for kept in self.kept if namespace not in (kept[0], None)]

    @rule(is_tree=st.booleans(), max_nodes=st.integers(0, 80), drains=st.booleans())
    def propose(self, is_tree: bool, max_nodes: int, drains: bool) -> None:
        if drains:
            self.cache.drain()
        rids = sorted(self.own, key=str)
        batch = DraftBatch.of_size(len(rids) + 1, 70)
        self.cache.propose_into(
            batch, rids, np.full(len(rids), max_nodes, np.int32), is_tree=is_tree
        )
        for row, rid in enumerate(rids):
            self._check_draft(batch, row, rid, is_tree, max_nodes)

    def _check_draft(
        self, batch: DraftBatch, row: int, rid: object, is_tree: bool, max_nodes: int
    ) -> None:
        num_nodes = int(batch.num_nodes[row])
        assert num_nodes <= min(max_nodes, 70)
        tokens, parents, depths, probs = (
            array[row, :num_nodes].tolist()
            for array in (batch.token_ids, batch.parents, batch.depths, batch.probs)
        )
        edges = set()
        kept = [output for side, output in self.kept if side == self.namespace[rid]]
        texts = [self.own[rid], *kept]
        pairs = {pair for text in texts for pair in itertools.pairwise(text)}
        last = self.own[rid][-1] if self.own[rid] else None
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            assert parent < node
            if not is_tree:
                assert parent == node - 1
            assert depths[node] == (1 if parent < 0 else depths[parent] + 1) <= 64
            assert 0 <= probs[node] <= (1 if parent < 0 else probs[parent])
            assert (parent, token) not in edges, "equal siblings must be one node"
            edges.add((parent, token))
            # Every pair of tokens was seen: an occurrence is followed, not made up.
            assert (last if parent < 0 else tokens[parent], token) in pairs
        if num_nodes:
            score = batch.matches[row, 1]
            assert np.isclose(score, np.sum(batch.probs[row, :num_nodes]), rtol=1e-4)

    @invariant()
    def structures_are_sound(self) -> None:
        self.cache.drain()
        self.cache.check()
        stats = self.cache.stats()
        assert stats.num_requests == len(self.own)
        assert stats.num_request_tokens == sum(map(len, self.own.values()))
        assert stats.num_shared_requests == len(self.kept)
        assert stats.num_shared_tokens == self._num_kept("left") + self._num_kept("right")


TestPaperModeEqualsTheOracle = PaperModeEqualsTheOracle.TestCase
TestPaperModeEqualsTheOracle.settings = settings(max_examples=60, stateful_step_count=30)
TestDefaultDraftsAreSound = DefaultDraftsAreSound.TestCase
TestDefaultDraftsAreSound.settings = settings(max_examples=60, stateful_step_count=30)
