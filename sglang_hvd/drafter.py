"""The hybrid drafter: decides cycle by cycle which draft each request verifies."""

import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import policies
from sglang_hvd.config import PAPER_THRESHOLD, HvdConfig
from sglang_hvd.payoff import (
    DraftFeatures,
    FallbackChange,
    ModelFigures,
    ModelPayoff,
    OnlineCalibration,
    OriginFigures,
    PayoffPredictor,
    Prediction,
    RequestTracker,
    TokenClasses,
)
from sglang_hvd.step_clock import Phase, StepClock
from sglang_hvd.suffix_cache import SuffixCache, SuffixCacheStats
from sglang_hvd.suffix_cache.token_ids import as_token_ids, padded
from sglang_hvd.types import (
    MATCH_FEATURES,
    DraftBatch,
    DraftPlan,
    DraftSource,
    TokenIds,
    VerifyOutcome,
)

logger = logging.getLogger(__name__)

_SCORE = MATCH_FEATURES.index("score")


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
    """What the suffix cache proposes to a batch, and what is expected of it. Row i belongs to
    request i. The arrays are the drafter's own: they hold until its next proposals.

    drafts: num_nodes is 0 where the cache proposes nothing.
    features: None in a drafter without token classes.
    prediction: calibrated; None in a drafter without a predictor.
    model_payoffs: float32[num_requests], expected accepted length of the model drafter's draft;
        None but under the payoff policy.
    """

    num_requests: int
    drafts: DraftBatch
    features: DraftFeatures | None
    prediction: Prediction | None
    model_payoffs: npt.NDArray[np.float32] | None

    @property
    def has_draft(self) -> npt.NDArray[np.bool_]:
        """bool[num_requests]."""
        return self.drafts.num_nodes[: self.num_requests] > 0

    def of_drafts(self, values: npt.NDArray[np.float32]) -> list[float | None]:
        """One value per request, None where there is no draft."""
        has_draft = self.has_draft.tolist()
        return [v if has else None for v, has in zip(values.tolist(), has_draft, strict=True)]


@dataclass(slots=True, eq=False)
class _Request:
    slot: int  # of the tracker
    without_cache: bool
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
        predictor: needed by the payoff policy.
        token_classes: needed by a predictor; without them no features are computed.
        num_model_steps: steps the model drafter runs in a cycle.
        max_cache_draft_tokens: longest cache draft that one verification takes.
        clock: measures what plan does.
        """
        if config.policy == "payoff" and (predictor is None or token_classes is None):
            raise ValueError("the payoff policy needs a predictor and token classes")
        self._config = config
        self._without_cache = DraftSource.MODEL if config.drafts_with_model else DraftSource.PLAIN
        self._cache = cache
        self._predictor: PayoffPredictor | None = None
        self._calibration: OnlineCalibration | None = None
        self._model_payoff = ModelPayoff(num_model_steps) if config.policy == "payoff" else None
        if predictor is not None:
            self.use_predictor(predictor)
        self._tracker = (
            None if token_classes is None else RequestTracker(config.history_window, token_classes)
        )
        self._frequency_threshold = (
            num_model_steps if config.frequency_threshold is None else config.frequency_threshold
        )
        self._max_cache_draft_tokens = max_cache_draft_tokens
        self._clock = clock or StepClock()
        self._requests: dict[Hashable, _Request] = {}
        # Reused from step to step; _votes are _drafts where the votes make these.
        self._drafts = self._votes = DraftBatch.of_size(0, 0)
        self._features = DraftFeatures.of_size(0)

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

    @property
    def predictor(self) -> PayoffPredictor | None:
        """The predictor in use."""
        return self._predictor

    def calibration(self) -> Mapping[str, OriginFigures] | None:
        """How right the predictor is, by origin of the draft; None where it is not calibrated."""
        return None if self._calibration is None else self._calibration.figures()

    def model_figures(self) -> ModelFigures | None:
        """How right the predictions of the model drafter's payoff are; None without any."""
        return None if self._model_payoff is None else self._model_payoff.figures()

    def read_predictor(self, path: Path) -> PayoffPredictor:
        """A predictor that use_predictor takes.

        Raises ValueError, in one line, if the policy has no use for one, or for a file that cannot
        be used with this configuration.
        """
        if self._config.policy != "payoff":
            raise ValueError(f"the {self._config.policy} policy has no predictor to replace")
        return PayoffPredictor.of_config(self._config.model_copy(update={"predictor": path}))

    def use_predictor(self, predictor: PayoffPredictor) -> None:
        """Predicts with this one from the next plan on, and calibrates it from the start. Active
        requests stay, and so does what is known of the model drafter."""
        self._predictor = predictor
        if self._config.calibrate:
            threshold = self._config.threshold
            self._calibration = OnlineCalibration(
                PAPER_THRESHOLD if threshold is None else threshold
            )

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
        slot = 0 if self._tracker is None else self._tracker.start(as_token_ids(prompt_ids))
        if self._model_payoff is not None:
            self._model_payoff.start(slot)
        self._requests[rid] = _Request(slot, without_cache)

    def plan(self, rids: Sequence[Hashable]) -> list[DraftPlan]:
        """Decides what each request of the batch verifies in its next cycle.

        Raises KeyError for a request that is not active.
        """
        if self._config.policy == "model":
            self._reserve(len(rids))
            self._drafts.num_nodes[: len(rids)] = 0
            return self.allocate(rids, Proposals(len(rids), self._drafts, None, None, None))
        return self.allocate(rids, self.propose(rids))

    def propose(
        self, rids: Sequence[Hashable], max_cache_draft_tokens: int | None = None
    ) -> Proposals:
        """The first half of plan: cache drafts, their features and predicted payoffs.

        max_cache_draft_tokens: another limit than this drafter's.
        """
        limit = max_cache_draft_tokens or self._max_cache_draft_tokens
        self._reserve(len(rids), limit)
        with self._clock.measure(Phase.PROPOSE):
            limits = np.full(len(rids), limit, np.int32)
            self._cache.propose_into(self._drafts, rids, limits)
            if self._votes is not self._drafts:
                self._cache.propose_into(self._votes, rids, limits, by_votes=True)
        if self._tracker is None:
            return Proposals(len(rids), self._drafts, None, None, None)
        with self._clock.measure(Phase.FEATURES):
            features = self._features.first(len(rids))
            slots = self._slots(map(self._request, rids))
            self._tracker.write_features(features, slots, self._drafts, self._votes)
        if self._predictor is None:
            return Proposals(len(rids), self._drafts, features, None, None)
        with self._clock.measure(Phase.PREDICT):
            prediction = self._predictor.predict(features)
            if self._calibration is not None:
                prediction = self._calibration.expect(slots, self._drafts, prediction)
            model_payoffs = None
            if self._model_payoff is not None:
                model_payoffs = self._model_payoff.expect(slots, self._drafts, prediction.survival)
        return Proposals(len(rids), self._drafts, features, prediction, model_payoffs)

    def allocate(self, rids: Sequence[Hashable], proposals: Proposals) -> list[DraftPlan]:
        """The second half of plan: the policy's decision."""
        with self._clock.measure(Phase.ALLOCATE):
            payoffs: list[float | None] = [None] * proposals.num_requests
            if proposals.prediction is not None:
                payoffs = proposals.of_drafts(proposals.prediction.payoffs)
            sources = self._decide(proposals, payoffs)
            plans = []
            for row, (rid, source, payoff) in enumerate(zip(rids, sources, payoffs, strict=True)):
                request = self._request(rid)
                if request.without_cache:
                    source = self._without_cache
                request.planned = source
                chosen = proposals.drafts.chain(row) if source is DraftSource.CACHE else None
                plans.append(DraftPlan(source, chosen, payoff))
            return plans

    def commit(self, rids: Sequence[Hashable], outcomes: Sequence[VerifyOutcome]) -> None:
        """Takes in what the target model made of the cycles planned last.

        Raises KeyError for a request that is not active, ValueError for invalid token ids; then
        nothing has changed.
        """
        requests = [self._request(rid) for rid in rids]
        assert all(r.planned for r in requests), "a cycle must be planned before it is committed"
        token_ids, lengths = padded([outcome.token_ids for outcome in outcomes])
        self._cache.commit(rids, token_ids, lengths)
        if self._tracker is not None:
            accepted = [
                outcome.num_accepted_drafts if request.planned is DraftSource.CACHE else None
                for request, outcome in zip(requests, outcomes, strict=True)
            ]
            self._tracker.commit(self._slots(requests), token_ids, lengths, accepted)
        self._observe(requests, outcomes)
        for request, outcome in zip(requests, outcomes, strict=True):
            _record(request, outcome)

    def extend(self, rid: Hashable, token_ids: TokenIds | Sequence[int]) -> None:
        """Takes in tokens committed outside a cycle: the one that prefill generates.

        Raises KeyError for a request that is not active, ValueError for invalid token ids.
        """
        request = self._request(rid)
        self._cache.commit([rid], [token_ids])
        if self._tracker is not None:
            self._tracker.extend(request.slot, as_token_ids(token_ids))
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
        if self._tracker is not None:
            self._tracker.finish(self._requests[rid].slot)
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

    def _reserve(self, num_requests: int, max_nodes: int = 1) -> None:
        """Makes the arrays that proposals are written into large enough."""
        rows, width = self._drafts.token_ids.shape
        if num_requests <= rows and max_nodes <= width:
            return
        rows, width = max(2 * rows, num_requests), max(width, max_nodes)
        self._drafts = self._votes = DraftBatch.of_size(rows, width)
        if self._tracker is not None:
            self._features = DraftFeatures.of_size(rows)
            if self._config.cache_mode == "paper":
                self._votes = DraftBatch.of_size(rows, width)

    def _slots(self, requests: Iterable[_Request]) -> npt.NDArray[np.int32]:
        return np.array([request.slot for request in requests], np.int32)

    def _by_payoff(
        self, proposals: Proposals, payoffs: Sequence[float | None]
    ) -> list[DraftSource]:
        assert proposals.prediction is not None
        assert proposals.model_payoffs is not None
        threshold = self._config.threshold
        if threshold is None:
            return policies.by_comparison(payoffs, proposals.model_payoffs.tolist())
        probs = proposals.prediction.reaches(math.ceil(threshold))
        if probs is None:
            return policies.by_payoff(payoffs, threshold)
        return policies.by_odds(proposals.of_drafts(probs))

    def _by_frequency(self, proposals: Proposals) -> list[DraftSource]:
        scores = proposals.drafts.features[: proposals.num_requests, _SCORE]
        return policies.by_frequency(proposals.of_drafts(scores), self._frequency_threshold)

    def _decide(self, proposals: Proposals, payoffs: Sequence[float | None]) -> list[DraftSource]:
        has_draft = proposals.has_draft.tolist()
        match self._config.policy:
            case "payoff":
                by_payoff = self._by_payoff(proposals, payoffs)
                if self._calibration is None or not self._calibration.has_fallback:
                    return by_payoff
                by_frequency = self._by_frequency(proposals)
                is_fallback = self._calibration.is_fallback(proposals.drafts, len(has_draft))
                return [
                    by_frequency[row] if is_off else by_payoff[row]
                    for row, is_off in enumerate(is_fallback)
                ]
            case "frequency":
                return self._by_frequency(proposals)
            case "cache":
                return policies.cache_only(has_draft)
            case "model":
                return [DraftSource.MODEL] * len(has_draft)

    def _observe(self, requests: Sequence[_Request], outcomes: Sequence[VerifyOutcome]) -> None:
        if self._model_payoff is None and self._calibration is None:
            return
        # Requests that never verify cache drafts tell nothing of those that do.
        told = [
            (request, outcome)
            for request, outcome in zip(requests, outcomes, strict=True)
            if not request.without_cache
        ]
        slots = self._slots(request for request, _ in told)
        token_ids = [outcome.token_ids for _, outcome in told]

        def accepted_of(source: DraftSource) -> list[int | None]:
            return [
                outcome.num_accepted_drafts if request.planned is source else None
                for request, outcome in told
            ]

        if self._model_payoff is not None:
            self._model_payoff.observe(slots, token_ids, accepted_of(DraftSource.MODEL))
        if self._calibration is not None:
            cache_accepted = accepted_of(DraftSource.CACHE)
            for change in self._calibration.observe(slots, token_ids, cache_accepted):
                _log(change)


def _log(change: FallbackChange) -> None:
    logger.warning(
        "HVD: cache drafts of origin %s: %.2f tokens predicted, %.2f accepted. %s.",
        change.origin,
        change.mean_predicted,
        change.mean_accepted,
        "The predictor is off: the frequency policy decides on them"
        if change.is_fallback
        else "The predictor is right again and decides on them",
    )


def _record(request: _Request, outcome: VerifyOutcome) -> None:
    stats, accepted = request.stats, outcome.num_accepted_drafts
    target_tokens = stats.num_target_tokens + outcome.num_target_tokens
    match request.planned:
        case DraftSource.CACHE:
            request.stats = replace(
                stats,
                num_cache_cycles=stats.num_cache_cycles + 1,
                num_cache_accepted_drafts=stats.num_cache_accepted_drafts + accepted,
                num_target_tokens=target_tokens,
            )
        case DraftSource.MODEL:
            request.stats = replace(
                stats,
                num_model_cycles=stats.num_model_cycles + 1,
                num_model_accepted_drafts=stats.num_model_accepted_drafts + accepted,
                num_target_tokens=target_tokens,
            )
        case DraftSource.PLAIN:
            request.stats = replace(
                stats, num_plain_cycles=stats.num_plain_cycles + 1, num_target_tokens=target_tokens
            )
    request.planned = None
