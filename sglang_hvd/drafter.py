"""The hybrid drafter: decides cycle by cycle which draft each request verifies."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import policies
from sglang_hvd.config import HvdConfig
from sglang_hvd.payoff import (
    DecodeState,
    PayoffPredictor,
    RequestHistory,
    TokenClasses,
    build_features,
)
from sglang_hvd.step_clock import Phase, StepClock
from sglang_hvd.suffix_cache import SuffixCache, SuffixCacheStats
from sglang_hvd.types import CacheDraft, DraftPlan, DraftSource, TokenIds, VerifyOutcome


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a request's cycles verified and what that brought.

    Every committed token is counted once: as an accepted cache draft token, an accepted model
    draft token, or a token of the target itself (the bonus token of a cycle, and tokens
    committed outside the cycles). Where a stop or a limit cuts the last cycle off, committed
    tokens are more than generated ones.
    """

    num_cache_cycles: int = 0
    num_model_cycles: int = 0
    num_plain_cycles: int = 0
    num_cache_accepted_drafts: int = 0
    num_model_accepted_drafts: int = 0
    num_target_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Proposals:
    """What the suffix cache proposes to a batch.

    drafts: one entry per request, None where the cache proposes nothing.
    features: float32[num_drafts, num_features], one row per draft that is there, in order; None
        in a drafter without token classes.
    """

    drafts: list[CacheDraft | None]
    features: npt.NDArray[np.float32] | None


@dataclass(slots=True, eq=False)
class _Request:
    prompt_len: int
    history: RequestHistory
    without_cache: bool
    generated_len: int = 0
    planned: DraftSource | None = None
    stats: RequestStats = RequestStats()


class HybridDrafter:
    """Life of a request: start, then plan and commit for each cycle, then finish.

    plan and commit take the whole running batch. Not thread-safe.
    """

    def __init__(
        self,
        config: HvdConfig,
        *,
        cache: SuffixCache,
        predictor: PayoffPredictor | None,
        token_classes: TokenClasses | None,
        num_model_steps: int,
        max_cache_draft_tokens: int,
        clock: StepClock | None = None,
    ) -> None:
        """
        predictor, token_classes: needed by the payoff policy.
        num_model_steps: steps the model drafter runs in a cycle.
        max_cache_draft_tokens: longest cache draft that one verification takes.
        clock: measures what plan does.
        """
        if config.policy == "payoff" and (predictor is None or token_classes is None):
            raise ValueError("the payoff policy needs a predictor and token classes")
        self._config = config
        self._without_cache = DraftSource.MODEL if config.drafts_with_model else DraftSource.PLAIN
        self._cache = cache
        self._predictor = predictor
        self._token_classes = token_classes
        self._frequency_threshold = (
            num_model_steps if config.frequency_threshold is None else config.frequency_threshold
        )
        self._max_cache_draft_tokens = max_cache_draft_tokens
        self._clock = clock or StepClock()
        self._requests: dict[Hashable, _Request] = {}

    @classmethod
    def from_config(
        cls,
        config: HvdConfig,
        *,
        token_strings: Iterable[str],
        num_model_steps: int,
        verify_width: int,
        deterministic: bool,
        clock: StepClock | None = None,
    ) -> "HybridDrafter":
        """The drafter that a configuration describes, with its own suffix cache.

        token_strings: decoded text of every token id, in order; only read by the payoff policy.
        verify_width: nodes per request that one verification takes, root included.
        deterministic: equal calls give equal plans, as several ranks need.

        Raises ValueError for a predictor file that cannot be used with this configuration.
        """
        predictor = token_classes = None
        if config.policy == "payoff":
            predictor = PayoffPredictor.of_config(config)
            token_classes = TokenClasses.from_strings(token_strings)
        return cls(
            config,
            cache=SuffixCache.of_config(config, deterministic=deterministic),
            predictor=predictor,
            token_classes=token_classes,
            num_model_steps=num_model_steps,
            max_cache_draft_tokens=min(config.max_draft_tokens, verify_width - 1),
            clock=clock,
        )

    @property
    def num_requests(self) -> int:
        """Active requests: started and not finished."""
        return len(self._requests)

    def start(
        self,
        rid: Hashable,
        prompt_ids: TokenIds | Sequence[int],
        *,
        namespace: str = "",
        without_cache: bool = False,
    ) -> None:
        """Takes in a request. Raises ValueError if rid is active or prompt_ids are no token ids.

        namespace: it sees outputs of finished requests with the same one only.
        without_cache: never verify its cache drafts, whatever the policy.
        """
        self._cache.start(rid, prompt_ids, namespace)
        history = RequestHistory(self._config.history_window)
        self._requests[rid] = _Request(len(prompt_ids), history, without_cache)

    def plan(self, rids: Sequence[Hashable]) -> list[DraftPlan]:
        """Decides what each request of the batch verifies in its next cycle.

        Raises KeyError for a request that is not active.
        """
        if self._config.policy == "model":
            return self.allocate(rids, Proposals([None] * len(rids), None))
        return self.allocate(rids, self.propose(rids))

    def propose(
        self, rids: Sequence[Hashable], max_cache_draft_tokens: int | None = None
    ) -> Proposals:
        """The first half of plan: cache drafts and their features.

        max_cache_draft_tokens: another limit than this drafter's.
        """
        with self._clock.measure(Phase.PROPOSE):
            drafts = self._cache.propose(
                rids, max_cache_draft_tokens or self._max_cache_draft_tokens
            )
        if self._token_classes is None:
            return Proposals(drafts, None)
        with self._clock.measure(Phase.FEATURES):
            states = [
                DecodeState(request.prompt_len, request.generated_len, request.history)
                for request, draft in zip(map(self._request, rids), drafts, strict=True)
                if draft is not None
            ]
            found = [draft for draft in drafts if draft is not None]
            return Proposals(drafts, build_features(found, states, self._token_classes))

    def allocate(self, rids: Sequence[Hashable], proposals: Proposals) -> list[DraftPlan]:
        """The second half of plan: predicted payoffs and the policy's decision."""
        with self._clock.measure(Phase.PREDICT):
            payoffs = self._payoffs(proposals)
        with self._clock.measure(Phase.ALLOCATE):
            sources = self._decide(proposals.drafts, payoffs)
            plans = []
            for rid, source, draft, payoff in zip(
                rids, sources, proposals.drafts, payoffs, strict=True
            ):
                request = self._request(rid)
                if request.without_cache:
                    source = self._without_cache
                request.planned = source
                chosen = draft if source is DraftSource.CACHE else None
                plans.append(DraftPlan(source, chosen, payoff))
            return plans

    def commit(self, rids: Sequence[Hashable], outcomes: Sequence[VerifyOutcome]) -> None:
        """Takes in what the target model made of the cycles planned last.

        Raises KeyError for a request that is not active, ValueError for invalid token ids; then
        nothing has changed.
        """
        requests = [self._request(rid) for rid in rids]
        assert all(r.planned for r in requests), "a cycle must be planned before it is committed"
        self._cache.commit(rids, [outcome.token_ids for outcome in outcomes])
        for request, outcome in zip(requests, outcomes, strict=True):
            _record(request, outcome)

    def extend(self, rid: Hashable, token_ids: TokenIds | Sequence[int]) -> None:
        """Takes in tokens committed outside a cycle: the one that prefill generates.

        Raises KeyError for a request that is not active, ValueError for invalid token ids.
        """
        request = self._request(rid)
        self._cache.commit([rid], [token_ids])
        request.generated_len += len(token_ids)
        request.stats = replace(
            request.stats, num_target_tokens=request.stats.num_target_tokens + len(token_ids)
        )

    def finish(
        self, rid: Hashable, *, output_ids: TokenIds | Sequence[int] | None, keep: bool
    ) -> RequestStats:
        """Forgets a request and returns its counts; keep: its output enters the shared cache.

        output_ids: the output to keep; None: all tokens committed since the prompt.

        Raises KeyError for a request that is not active.
        """
        stats = self.stats(rid)
        self._cache.finish(rid, keep=keep, output_ids=output_ids)
        del self._requests[rid]
        return stats

    def flush(self) -> None:
        """Empties the shared cache. Active requests keep their own prompt and output."""
        self._cache.flush()

    def drain(self) -> None:
        """Waits until the suffix cache has taken in all that it was given."""
        self._cache.drain()

    def cache_stats(self) -> SuffixCacheStats:
        """What the suffix cache holds."""
        return self._cache.stats()

    def stats(self, rid: Hashable) -> RequestStats:
        """The counts of an active request so far. Raises KeyError for any other."""
        return self._request(rid).stats

    def _request(self, rid: Hashable) -> _Request:
        if rid not in self._requests:
            raise KeyError(f"request {rid!r} is not active: start it first")
        return self._requests[rid]

    def _payoffs(self, proposals: Proposals) -> list[float | None]:
        if self._predictor is None or proposals.features is None:
            return [None] * len(proposals.drafts)
        predicted = iter(self._predictor.predict(proposals.features).tolist())
        return [None if draft is None else next(predicted) for draft in proposals.drafts]

    def _decide(
        self, drafts: Sequence[CacheDraft | None], payoffs: Sequence[float | None]
    ) -> list[DraftSource]:
        match self._config.policy:
            case "payoff":
                return policies.by_payoff(payoffs, self._config.threshold)
            case "frequency":
                return policies.by_frequency(drafts, self._frequency_threshold)
            case "cache":
                return policies.cache_only(drafts)
            case "model":
                return [DraftSource.MODEL] * len(drafts)


def _record(request: _Request, outcome: VerifyOutcome) -> None:
    stats, accepted = request.stats, outcome.num_accepted_drafts
    target_tokens = stats.num_target_tokens + outcome.num_target_tokens
    match request.planned:
        case DraftSource.CACHE:
            request.history.record(accepted)
            request.stats = replace(
                stats,
                num_cache_cycles=stats.num_cache_cycles + 1,
                num_cache_accepted_drafts=stats.num_cache_accepted_drafts + accepted,
                num_target_tokens=target_tokens,
            )
        case DraftSource.MODEL:
            request.history.record(None)
            request.stats = replace(
                stats,
                num_model_cycles=stats.num_model_cycles + 1,
                num_model_accepted_drafts=stats.num_model_accepted_drafts + accepted,
                num_target_tokens=target_tokens,
            )
        case DraftSource.PLAIN:
            request.history.record(None)
            request.stats = replace(
                stats, num_plain_cycles=stats.num_plain_cycles + 1, num_target_tokens=target_tokens
            )
    request.generated_len += len(outcome.token_ids)
    request.planned = None
