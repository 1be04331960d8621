"""The suffix cache: what requests have generated, and cache drafts from it."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_hvd.replay.core.single_cycles import CacheDraft
from sglang_hvd.suffix_cache.token_ids import as_token_ids
from sglang_hvd.types import TokenIds
from tests.suffix_cache.oracle.matching import Continuation, DraftLimits, best_continuation
from tests.suffix_cache.oracle.token_text import TokenText


@dataclass(frozen=True, slots=True)
class OracleStats:
    """Sizes: active requests and their tokens, finished requests in the shared cache and theirs."""

    num_requests: int
    num_request_tokens: int
    num_shared_requests: int
    num_shared_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    text: TokenText
    prompt_len: int


class OracleCache:
    """Proposes continuations of earlier occurrences of a request's latest tokens.

    It looks in the request's own prompt and output and in a shared cache: the outputs of finished
    requests, within a budget of tokens, the oldest request leaving first. An output longer than
    the whole budget is not kept. Drafts and scores are SuffixDecoding's at the given settings
    (see matching.py); the one difference is that a request enters the shared cache when it
    finishes, while ArcticInference shares its output from the first token on. After an eviction,
    equally frequent tokens are ranked as if the evicted output had never been there.

    Every method takes the requests of a whole batch or one request; none keeps a reference to
    an array of the caller. Not thread-safe.
    """

    def __init__(
        self,
        *,
        max_depth: int = 64,
        max_draft_tokens: int = 64,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        shared_cache_tokens: int = 100_000,
    ) -> None:
        self._max_depth = max_depth
        self._limits = DraftLimits.of(
            max_depth=max_depth,
            max_draft_tokens=max_draft_tokens,
            max_spec_factor=max_spec_factor,
            max_spec_offset=max_spec_offset,
            min_token_prob=min_token_prob,
        )
        self._budget = shared_cache_tokens
        self._requests: dict[Hashable, _Request] = {}
        self._forget_shared()

    @property
    def num_requests(self) -> int:
        """Active requests: started and not finished."""
        return len(self._requests)

    def stats(self) -> OracleStats:
        return OracleStats(
            num_requests=len(self._requests),
            num_request_tokens=sum(len(r.text) for r in self._requests.values()),
            num_shared_requests=len(self._shared_lens),
            num_shared_tokens=sum(self._shared_lens),
        )

    def start(self, rid: Hashable, prompt_ids: TokenIds | Sequence[int]) -> None:
        """Takes in a request. Raises ValueError if rid is active or prompt_ids are no token ids."""
        if rid in self._requests:
            raise ValueError(f"request {rid!r} is already active: finish it first")
        prompt_ids = as_token_ids(prompt_ids)
        text = TokenText(guard=self._max_depth)
        text.extend(prompt_ids)
        self._requests[rid] = _Request(text, len(prompt_ids))

    def commit(
        self, rids: Sequence[Hashable], token_ids: Sequence[TokenIds | Sequence[int]]
    ) -> None:
        """Appends the tokens that each request generated; changes nothing if one is invalid.

        Raises KeyError for a request that is not active, ValueError for a repeated one or
        invalid token ids.
        """
        if len(set(rids)) != len(rids):
            raise ValueError("a request may appear only once in a commit")
        commits = [
            (self._request(rid).text, as_token_ids(ids))
            for rid, ids in zip(rids, token_ids, strict=True)
        ]
        for text, ids in commits:
            text.extend(ids)

    def propose(
        self, rids: Sequence[Hashable], max_tokens: int | Sequence[int]
    ) -> list[CacheDraft | None]:
        """The cache draft of each request, None where nothing matches.

        max_tokens: longest draft wanted, for all requests or one entry per request.

        Raises KeyError for a request that is not active.
        """
        if isinstance(max_tokens, int):
            max_tokens = [max_tokens] * len(rids)
        requests = [self._request(rid) for rid in rids]
        return [
            self._propose(request.text, limit)
            for request, limit in zip(requests, max_tokens, strict=True)
        ]

    def finish(
        self,
        rid: Hashable,
        *,
        keep: bool,
        output_ids: TokenIds | Sequence[int] | None = None,
    ) -> None:
        """Forgets a request; keep: its output goes into the shared cache.

        output_ids: the output to keep; None: all tokens committed since the prompt.

        Raises KeyError if rid is not active, ValueError for invalid token ids.
        """
        request = self._request(rid)
        if output_ids is None:
            kept_ids = request.text.tokens[request.prompt_len :]
        else:
            kept_ids = as_token_ids(output_ids)
        del self._requests[rid]
        if keep:
            self._share(kept_ids)

    def flush(self) -> None:
        """Empties the shared cache. Active requests keep their own prompt and output."""
        self._forget_shared()

    def _request(self, rid: Hashable) -> _Request:
        if rid not in self._requests:
            raise KeyError(f"request {rid!r} is not active: start it first")
        return self._requests[rid]

    def _propose(self, text: TokenText, max_tokens: int) -> CacheDraft | None:
        limits = self._limits.at_most(max_tokens)
        # The longest match leaves out the first token, and room for one draft token.
        context = text.tokens[1:][-(self._max_depth - 1) :]
        if not len(context):
            return None
        own = best_continuation(text.with_guard, self._max_depth, context, limits)
        shared = best_continuation(self._shared.with_guard, self._max_depth, context, limits)
        if own is not None and (shared is None or own.score >= shared.score):
            return _draft(own, "request")
        return None if shared is None else _draft(shared, "shared")

    def _share(self, output_ids: TokenIds) -> None:
        if not 0 < len(output_ids) <= self._budget:
            return
        num_tokens = sum(self._shared_lens) + len(output_ids)
        while num_tokens > self._budget:
            evicted = self._shared_lens.popleft()
            self._shared.drop_front(evicted + 1)
            num_tokens -= evicted
        self._shared.extend(output_ids)
        self._shared.close()
        self._shared_lens.append(len(output_ids))

    def _forget_shared(self) -> None:
        self._shared = TokenText(guard=self._max_depth)
        self._shared_lens: deque[int] = deque()


def _draft(found: Continuation, source: Literal["request", "shared"]) -> CacheDraft:
    token_ids = found.token_ids
    token_ids.flags.writeable = False
    return CacheDraft(token_ids, found.match_len, found.score, source)
