"""The suffix cache keeps what requests have generated and drafts from it. Its core is native."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd._native import CacheCore, CacheSettings, PaperSettings
from sglang_hvd.config import HvdConfig
from sglang_hvd.suffix_cache.outputs import NamespaceContents, SharedOutputs
from sglang_hvd.suffix_cache.token_ids import as_token_ids, padded
from sglang_hvd.types import DraftBatch, TokenIds

_MAX_BUDGET = 2**30

# Tokens that are copied out of the shared cache while no other call can run: some 50 us.
_COPIED_TOKENS = 64 * 1024


@dataclass(frozen=True, slots=True)
class SuffixCacheStats:
    """Sizes: active requests, finished requests in the shared cache, and memory.

    num_sessions, num_session_tokens: prompts of finished requests, kept for their next turn.
    num_pending_tokens: tokens of active requests and of finished outputs that are not indexed yet.
    num_bytes: memory of texts and tables, including freed blocks that are kept for reuse.
    """

    num_requests: int
    num_request_tokens: int
    num_shared_requests: int
    num_shared_tokens: int
    num_namespaces: int
    num_sessions: int
    num_session_tokens: int
    num_pending_tokens: int
    num_bytes: int


class SuffixCache:
    """Proposes what followed earlier occurrences of a request's latest tokens.

    It looks in the request's own prompt and output and in the shared cache: the outputs of
    finished requests of its namespace, within a budget of tokens for each namespace and one for
    all of them. The output that finished first leaves first. An output longer than a budget is not
    kept. Namespaces never see each other's tokens. docs/experiments/suffix-cache.md says how
    drafts are made.

    All methods but shared_outputs are called from one thread; native/cache_core.hpp states the
    whole thread rule. They release the GIL. The cache keeps no array of the caller.

    background: the cache's own thread indexes prompts of more than 512 tokens and the outputs of
        finished requests, and a proposal uses what is indexed so far. With False every call
        returns when its work is done.
    deterministic: equal calls give equal drafts, which ranks need that must decide alike. Every
        call that changes or reads texts first waits until the thread has finished its work.
    session_tokens: budget of finished requests' prompts. They stay indexed so that the next turn of
        a session, which begins with the same tokens, need not index them again. No other request
        reads them. The oldest one leaves first. Prompts of less than 1,088 tokens are not kept.
    min_token_prob: a draft leaves out tokens whose estimated probability is lower.
    paper: draft as in the paper; as_in_paper sets it.
    """

    def __init__(
        self,
        *,
        shared_cache_tokens: int = 100_000,
        namespace_tokens: int | None = None,
        session_tokens: int = 1_000_000,
        background: bool = True,
        deterministic: bool = False,
        min_token_prob: float = 0.0,
        paper: PaperSettings | None = None,
    ) -> None:
        shared, each = _budgets(shared_cache_tokens, namespace_tokens)
        # Whether texts that are added delay the caller until they are indexed.
        self.indexes_inline = deterministic or not background or paper is not None
        self._slots: dict[Hashable, int] = {}
        self.core = CacheCore(
            CacheSettings(
                shared_tokens=shared,
                namespace_tokens=each,
                session_tokens=_budget("session_tokens", session_tokens),
                indexes_in_background=background,
                is_deterministic=deterministic,
                min_token_prob=min_token_prob,
                paper=paper,
            )
        )

    @classmethod
    def as_in_paper(
        cls,
        *,
        max_depth: int = 64,
        max_draft_tokens: int = 64,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        shared_cache_tokens: int = 100_000,
        namespace_tokens: int | None = None,
    ) -> "SuffixCache":
        """A cache with the drafts and scores of SuffixDecoding (ArcticInference 0.3.0).

        It does everything in the calling thread and proposes chains only. A proposal takes time
        linear in the number of occurrences of the request's last token.
        """
        if max_depth < 2:
            raise ValueError(f"max_depth must be at least 2, got {max_depth}")
        return cls(
            shared_cache_tokens=shared_cache_tokens,
            namespace_tokens=namespace_tokens,
            session_tokens=0,
            background=False,
            paper=PaperSettings(
                max_depth=max_depth,
                max_draft_tokens=max_draft_tokens,
                max_spec_factor=max_spec_factor,
                max_spec_offset=max_spec_offset,
                min_token_prob=min_token_prob,
            ),
        )

    @classmethod
    def of_config(
        cls, config: HvdConfig, *, background: bool = True, deterministic: bool = False
    ) -> "SuffixCache":
        """The cache that a configuration describes; other arguments as in the constructor."""
        if config.cache_mode == "votes":
            return cls(
                shared_cache_tokens=config.shared_cache_tokens,
                namespace_tokens=config.namespace_cache_tokens,
                session_tokens=config.session_cache_tokens,
                background=background,
                deterministic=deterministic,
                min_token_prob=config.lowest_token_prob,
            )
        return cls.as_in_paper(
            max_depth=config.max_depth,
            max_draft_tokens=config.max_draft_tokens,
            max_spec_factor=config.max_spec_factor,
            max_spec_offset=config.max_spec_offset,
            min_token_prob=config.lowest_token_prob,
            shared_cache_tokens=config.shared_cache_tokens,
            namespace_tokens=config.namespace_cache_tokens,
        )

    def slot_of(self, rid: Hashable) -> int:
        """The slot by which the core knows a request. Raises KeyError if it is not active."""
        if rid not in self._slots:
            raise KeyError(f"request {rid!r} is not active: start it first")
        return self._slots[rid]

    def slots_of(self, rids: Sequence[Hashable]) -> npt.NDArray[np.int32]:
        """The slots of requests: int32[num_requests]. Raises KeyError if one is not active."""
        slots = list(map(self._slots.get, rids))
        if None in slots:
            self.slot_of(rids[slots.index(None)])
        return np.array(slots, np.int32)

    @property
    def num_requests(self) -> int:
        """Active requests: started and not finished."""
        return len(self._slots)

    def stats(self) -> SuffixCacheStats:
        return SuffixCacheStats(**self.core.stats())

    def start(
        self, rid: Hashable, prompt_ids: TokenIds | Sequence[int], namespace: str = ""
    ) -> None:
        """Adds a request. Raises ValueError if rid is active or prompt_ids are no token ids."""
        contiguous = _contiguous(prompt_ids)
        if rid in self._slots:
            raise ValueError(
                f"request {rid!r} is already active: finish it before starting it again"
            )
        self._slots[rid] = self.core.start(namespace, contiguous)

    def commit(
        self,
        rids: Sequence[Hashable],
        token_ids: TokenIds | Sequence[TokenIds | Sequence[int]],
        lengths: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Appends the tokens that each request generated; changes nothing if one is invalid.

        token_ids: one entry per request. With lengths it is int32[num_requests, width], of which
            the first lengths[i] entries of row i count, and nothing is copied before the core
            reads it.

        Raises KeyError for a request that is not active, ValueError for a repeated request or
        invalid token ids, TypeError for arrays of another dtype, shape or layout.
        """
        if len(set(rids)) != len(rids):
            raise ValueError("a request may appear only once in a commit")
        slots = self.slots_of(rids)
        if lengths is None:
            self.core.commit(slots, *padded(token_ids))
        elif isinstance(token_ids, np.ndarray):
            self.core.commit(slots, token_ids, lengths)
        else:
            raise TypeError("with lengths, token_ids must be int32[num_requests, width]")

    def propose_into(
        self,
        batch: DraftBatch,
        rids: Sequence[Hashable],
        max_nodes: npt.NDArray[np.int32],
        *,
        is_tree: bool = False,
        by_votes: bool = False,
        with_evidence: bool = False,
    ) -> None:
        """Writes each request's draft into its row of the batch: a chain, or a tree.

        max_nodes: int32[num_requests], maximum number of nodes of each draft; the batch's width
            also limits it. No node is deeper than 64.
        by_votes: draft by votes, as a second opinion, even if the cache drafts as in the paper.
        with_evidence: also write the batch's `evidence`: what else the texts know of the chains,
            for the payoff predictor. It takes longer.

        Raises KeyError for a request that is not active, ValueError if the batch has too few rows,
        TypeError for arrays of another dtype or shape.
        """
        self.core.propose(self.slots_of(rids), max_nodes, is_tree, by_votes, with_evidence, batch)

    def finish(
        self,
        rid: Hashable,
        *,
        keep: bool,
        output_ids: TokenIds | Sequence[int] | None = None,
    ) -> None:
        """Forgets a request.

        keep: whether its output enters the shared cache of its namespace.
        output_ids: the output to keep; None: all tokens committed since the prompt.

        Raises KeyError if rid is not active, ValueError for invalid token ids.
        """
        output = None if output_ids is None else _contiguous(output_ids)
        self.core.finish(self.slot_of(rid), keep, output)
        del self._slots[rid]

    def add(self, outputs: SharedOutputs) -> None:
        """Shares outputs as if requests of their namespaces had finished with them just now, in
        this order. Outputs longer than a budget are left out, as those of requests are."""
        for name, token_ids, lengths, kept_at in outputs.by_namespace():
            self.core.add(name, token_ids, lengths, kept_at)

    def shared_outputs(self) -> Iterator[SharedOutputs]:
        """Copies what the shared cache holds, in pieces, for any thread. Other calls go on in
        between: outputs that leave meanwhile may be missing, and those that enter may be there."""
        serial = 0
        while True:
            names, spaces, lengths, kept_at, token_ids, serial = self.core.copy_after(
                serial, _COPIED_TOKENS
            )
            if serial == 0:
                return
            yield SharedOutputs(
                namespaces=names,
                spaces=np.frombuffer(spaces, np.int32),
                lengths=np.frombuffer(lengths, np.int32),
                kept_at=np.frombuffer(kept_at, np.int64),
                token_ids=np.frombuffer(token_ids, np.int32),
            )

    def contents(self) -> list[NamespaceContents]:
        """What each namespace of the shared cache holds; nothing of those that hold nothing."""
        return [NamespaceContents(*of_space) for of_space in self.core.contents()]

    def flush(self, namespace: str | None = None) -> None:
        """Empties the shared cache of one namespace, or of all. Active requests keep their own
        prompt and output."""
        if namespace is None:
            self.core.flush_all()
        else:
            self.core.flush(namespace)

    def resize(self, shared_cache_tokens: int, namespace_tokens: int | None = None) -> None:
        """Changes the budgets and evicts the oldest outputs that exceed them.

        Raises ValueError for a budget out of range.
        """
        self.core.resize(*_budgets(shared_cache_tokens, namespace_tokens))

    def drain(self) -> None:
        """Waits until everything handed in so far is indexed."""
        self.core.drain()

    def check(self) -> None:
        """Asserts that all structures are sound. Takes time linear in the tokens."""
        broken = self.core.check()
        assert broken is None, broken


def _budgets(shared_cache_tokens: int, namespace_tokens: int | None) -> tuple[int, int]:
    each = shared_cache_tokens if namespace_tokens is None else namespace_tokens
    return _budget("shared_cache_tokens", shared_cache_tokens), _budget("namespace_tokens", each)


def _budget(name: str, num_tokens: int) -> int:
    if not 0 <= num_tokens <= _MAX_BUDGET:
        raise ValueError(f"{name} must lie in 0..{_MAX_BUDGET}, got {num_tokens}")
    return num_tokens


def _contiguous(token_ids: TokenIds | Sequence[int]) -> TokenIds:
    return np.ascontiguousarray(as_token_ids(token_ids))
