"""All caches behind one interface, each used as its documentation says."""

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_hvd.replay.core.replayed import right_branch
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import DraftBatch, TokenIds

MAX_DRAFT_TOKENS = 64
MAX_REQUESTS = 64


class Contestant(Protocol):
    def start(self, rid: int, prompt_ids: TokenIds) -> None: ...
    def commit(
        self, rids: Sequence[int], token_ids: TokenIds, lengths: npt.NDArray[np.int32]
    ) -> None: ...
    def propose(self, rids: Sequence[int]) -> None: ...
    def accepted(self, row: int, continuation: TokenIds) -> int: ...
    def finish(self, rid: int) -> None: ...
    def drain(self) -> None: ...
    def evict_to(self, num_tokens: int) -> None: ...


class Ours:
    """num_nodes: size of the trees; 0: chains of up to 64 tokens."""

    def __init__(self, num_nodes: int = 0) -> None:
        self.cache = SuffixCache(shared_cache_tokens=2**24)
        self._is_tree = num_nodes > 0
        width = num_nodes or MAX_DRAFT_TOKENS
        self._width = width
        self._of_thread = threading.local()
        self._max_nodes = np.full(MAX_REQUESTS, width, np.int32)

    @property
    def _batch(self) -> DraftBatch:
        """The arrays of the calling thread."""
        if not hasattr(self._of_thread, "batch"):
            self._of_thread.batch = DraftBatch.of_size(MAX_REQUESTS, self._width)
        batch: DraftBatch = self._of_thread.batch
        return batch

    def start(self, rid: int, prompt_ids: TokenIds) -> None:
        self.cache.start(rid, prompt_ids)

    def commit(
        self, rids: Sequence[int], token_ids: TokenIds, lengths: npt.NDArray[np.int32]
    ) -> None:
        self.cache.commit(rids, token_ids, lengths)

    def propose(self, rids: Sequence[int]) -> None:
        limits = self._max_nodes[: len(rids)]
        self.cache.propose_into(self._batch, rids, limits, is_tree=self._is_tree)

    def accepted(self, row: int, continuation: TokenIds) -> int:
        num_nodes = int(self._batch.num_nodes[row])
        token_ids = self._batch.token_ids[row, :num_nodes]
        return len(right_branch(token_ids, self._batch.parents[row, :num_nodes], continuation))

    def finish(self, rid: int) -> None:
        self.cache.finish(rid, keep=True)

    def drain(self) -> None:
        self.cache.drain()

    def evict_to(self, num_tokens: int) -> None:
        self.cache.resize(num_tokens)


class Arctic:
    """ArcticInference at the paper's settings."""

    def __init__(self, module: ModuleType) -> None:
        self._cache = module.SuffixDecodingCache(max_tree_depth=64, max_cached_requests=-1)
        self._tokens: dict[int, npt.NDArray[np.int32]] = {}
        self._num_tokens: dict[int, int] = {}
        self._drafts: list[tuple[list[int], list[int]]] = []
        self._cached: dict[int, int] = {}  # rid -> output tokens

    def start(self, rid: int, prompt_ids: TokenIds) -> None:
        self._cache.start_request(rid, prompt_ids)
        # The caller must pass the context; like vLLM, keep it in a growing array.
        tokens = np.empty(2 * len(prompt_ids) + 4096, np.int32)
        tokens[: len(prompt_ids)] = prompt_ids
        self._tokens[rid], self._num_tokens[rid] = tokens, len(prompt_ids)
        self._cached[rid] = 0

    def commit(
        self, rids: Sequence[int], token_ids: TokenIds, lengths: npt.NDArray[np.int32]
    ) -> None:
        for rid, row, length in zip(rids, token_ids, lengths, strict=True):
            new_ids = row[:length]
            self._cache.add_active_response(rid, new_ids)
            begin = self._num_tokens[rid]
            end = begin + len(new_ids)
            if end > len(self._tokens[rid]):
                self._tokens[rid] = np.concatenate([self._tokens[rid], np.empty(end, np.int32)])
            self._tokens[rid][begin:end] = new_ids
            self._num_tokens[rid] = end
            self._cached[rid] += len(new_ids)

    def propose(self, rids: Sequence[int]) -> None:
        self._drafts = []
        for rid in rids:
            end = self._num_tokens[rid]
            context = self._tokens[rid][max(end - 64, 0) : end]
            draft = self._cache.speculate(rid, context, max_spec_tokens=MAX_DRAFT_TOKENS)
            self._drafts.append((draft.token_ids, draft.parents))

    def accepted(self, row: int, continuation: TokenIds) -> int:
        token_ids, parents = (np.array(values, np.int32) for values in self._drafts[row])
        return len(right_branch(token_ids, parents, continuation))

    def finish(self, rid: int) -> None:
        self._cache.stop_request(rid)
        del self._tokens[rid], self._num_tokens[rid]

    def drain(self) -> None:
        pass

    def evict_to(self, num_tokens: int) -> None:
        while sum(self._cached.values()) > num_tokens:
            oldest = next(iter(self._cached))
            self._cache.evict_cached_response(oldest)
            del self._cached[oldest]


class Ngram:
    """SGLang's NGRAM corpus with its server's defaults, used as its worker does.

    It ignores prompts, and proposes a tree of 11 tokens after the last token.
    """

    NUM_NODES = 11
    _DEPTH = 18

    def __init__(self, module: ModuleType) -> None:
        self._corpus = module.NgramCorpus(
            max_trie_depth=self._DEPTH,
            min_bfs_breadth=1,
            max_bfs_breadth=10,
            draft_token_num=1 + self.NUM_NODES,
            match_type="BFS",
            capacity=10_000_000,
        )
        self._tails: dict[int, list[int]] = {}
        self._num_tokens: dict[int, int] = {}
        self._drafts: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None

    def start(self, rid: int, prompt_ids: TokenIds) -> None:
        self._tails[rid] = prompt_ids[-self._DEPTH :].tolist()
        self._num_tokens[rid] = len(prompt_ids)

    def commit(
        self, rids: Sequence[int], token_ids: TokenIds, lengths: npt.NDArray[np.int32]
    ) -> None:
        windows = []
        for rid, row, length in zip(rids, token_ids.tolist(), lengths.tolist(), strict=True):
            text = self._tails[rid] + row[:length]
            windows.append(text[-max(self._DEPTH, length) :])
            self._tails[rid] = text[-self._DEPTH :]
            self._num_tokens[rid] += length
        self._corpus.batch_put(windows)

    def propose(self, rids: Sequence[int]) -> None:
        self._corpus.synchronize()
        tails = [self._tails[rid] for rid in rids]
        totals = [self._num_tokens[rid] for rid in rids]
        self._drafts = self._corpus.batch_get([str(rid) for rid in rids], tails, totals)

    def accepted(self, row: int, continuation: TokenIds) -> int:
        assert self._drafts is not None
        width = 1 + self.NUM_NODES
        token_ids = self._drafts[0].reshape(-1, width)[row, 1:].astype(np.int32)
        sees = self._drafts[1].reshape(-1, width, width)[row].astype(bool)
        # A node sees its ancestors and itself. Its parent is the last node before it that it sees.
        # Unused slots see nothing.
        parents = [
            int(np.flatnonzero(sees[node, :node])[-1]) - 1 if sees[node, :node].any() else width
            for node in range(1, width)
        ]
        return len(right_branch(token_ids, np.array(parents, np.int32), continuation))

    def finish(self, rid: int) -> None:
        self._corpus.erase_match_state([str(rid)])
        del self._tails[rid], self._num_tokens[rid]

    def drain(self) -> None:
        self._corpus.synchronize()

    def evict_to(self, num_tokens: int) -> None:
        raise NotImplementedError("the corpus keeps all the memory that it allocates at the start")
