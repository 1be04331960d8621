"""The hybrid drafter: decides cycle by cycle which draft each request verifies."""

import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import CacheTrees, DraftOdds, StepAllocator, policies
from sglang_hvd.config import PAPER_THRESHOLD, HvdConfig
from sglang_hvd.payoff import (
    BranchPayoff,
    DraftFeatures,
    FallbackChange,
    ModelFigures,
    ModelPayoff,
    ModelReaches,
    OnlineCalibration,
    OriginFigures,
    PayoffPredictor,
    Prediction,
    RequestTracker,
    TokenClasses,
    VerifiedCacheDraft,
    VerifiedModelDraft,
)
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.request_stats import RequestStats
from sglang_hvd.step_clock import Phase, StepClock
from sglang_hvd.suffix_cache import SuffixCache, SuffixCacheStats
from sglang_hvd.suffix_cache.token_ids import as_token_ids, num_agreeing, padded
from sglang_hvd.types import (
    MATCH_FEATURES,
    DraftBatch,
    DraftPlan,
    DraftSource,
    TokenIds,
    VerifyOutcome,
)

logger = logging.getLogger(__name__)

_NOTHING = np.zeros(0, np.int32)
# Nodes that the votes are asked for in a batch, and for each request: large batches verify few, and
# asking takes time. Chains are as long as ever.
_BRANCH_NODES, _FEWEST_BRANCH_NODES = 512, 8

_SCORE = MATCH_FEATURES.index("score")


@dataclass(frozen=True, slots=True, eq=False)
class Proposals:
    """What the suffix cache proposes to a batch, and what is expected of it. Row i belongs to
    request i. The arrays are the drafter's own: they hold until its next proposals.

    drafts: num_nodes is 0 where the cache proposes nothing.
    features: None in a drafter without token classes.
    prediction: calibrated; None in a drafter without a predictor.
    model_payoffs: float32[num_requests], expected accepted length of the model drafter's draft;
        None but under the policies allocate and payoff.
    trees: the cache drafts to choose from, with the probabilities by which to allocate; None but
        under the allocate policy.
    model_reaches: likewise of the model drafter's draft; None likewise.
    """

    num_requests: int
    drafts: DraftBatch
    features: DraftFeatures | None
    prediction: Prediction | None
    model_payoffs: npt.NDArray[np.float32] | None = None
    trees: CacheTrees | None = None
    model_reaches: ModelReaches | None = None

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
    """planned: the cycle to commit. draft_len: of the whole cache chain then. chain, chain_len: the
    tokens of that and of how many the cycle tells; a tree has branches beside it. Under the
    allocate policy, model_size: of the model drafter's draft, which has fewer nodes in few steps;
    cache_expected, model_expected: accepted tokens expected of that chain and of that draft;
    branch_expected: of the branches beside the chain, were the votes always right there."""

    slot: int
    without_cache: bool
    planned: DraftPlan | None = None
    draft_len: int = 0
    chain: TokenIds = field(default_factory=lambda: _NOTHING)
    chain_len: int = 0
    model_size: int = 0
    cache_expected: float = 0.0
    branch_expected: float = 0.0
    model_expected: float = 0.0
    stats: RequestStats = RequestStats()  # noqa: RUF009  it is immutable


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
        num_model_nodes: int,
        verify_width: int,
        allocator: StepAllocator | None = None,
        verifies_trees: bool = True,
        clock: StepClock | None = None,
    ) -> None:
        """
        predictor: needed by the policies allocate and payoff.
        token_classes: needed by a predictor; without them no features are computed.
        num_model_steps: steps the model drafter runs in a cycle.
        num_model_nodes: nodes of its draft, root not included.
        verify_width: most nodes per request that one verification takes, root included.
        allocator: needed by the policy allocate.
        verifies_trees: whether cache drafts may branch.
        clock: measures what plan does.
        """
        if config.predicts and (predictor is None or token_classes is None):
            raise ValueError(f"the {config.policy} policy needs a predictor and token classes")
        if config.policy == "allocate":
            if allocator is None:
                raise ValueError("the allocate policy needs an allocator")
            if predictor is not None:
                check_distribution(predictor)
        self._config = config
        self._without_cache = DraftSource.MODEL if config.drafts_with_model else DraftSource.PLAIN
        self._cache = cache
        self._predictor: PayoffPredictor | None = None
        self._calibration: OnlineCalibration | None = None
        self._branch_payoff = BranchPayoff()
        self._allocator = allocator if config.policy == "allocate" else None
        self._model_payoff: ModelPayoff | None = None
        if self._allocator is not None:
            self._model_payoff = ModelPayoff(num_model_steps, self._allocator.model_sizes)
        elif config.policy == "payoff":
            self._model_payoff = ModelPayoff(num_model_steps)
        if predictor is not None:
            self.use_predictor(predictor)
        self._tracker = (
            None if token_classes is None else RequestTracker(config.history_window, token_classes)
        )
        self._frequency_threshold = (
            num_model_steps if config.frequency_threshold is None else config.frequency_threshold
        )
        self._num_model_steps, self._num_model_nodes = num_model_steps, num_model_nodes
        self._room = verify_width - 1
        self._max_cache_draft_tokens = min(config.max_draft_tokens, self._room)
        if config.policy == "allocate":  # of the tokens behind nothing is known
            self._max_cache_draft_tokens = min(self._max_cache_draft_tokens, MAX_DRAFT_LEN)
        self._clock = clock or StepClock()
        self._requests: dict[Hashable, _Request] = {}
        # Reused from step to step; _votes are _drafts where the votes make these.
        self._drafts = self._votes = DraftBatch.of_size(0, 0)
        self._features = DraftFeatures.of_size(0)
        # Of the allocate policy: what the votes say of branches, and the drafts with these.
        self._branches, self._trees = DraftBatch.of_size(0, 0), CacheTrees(0, 1)
        # SuffixDecoding drafts chains only, and its votes are not the predictor's.
        self._has_branches = (
            config.policy == "allocate"
            and config.branches
            and config.cache_mode == "votes"
            and verifies_trees
        )

    @classmethod
    def from_config(
        cls,
        config: HvdConfig,
        *,
        token_strings: Iterable[str],
        num_model_steps: int,
        num_model_nodes: int,
        verify_width: int,
        deterministic: bool,
        allocator: StepAllocator | None = None,
        verifies_trees: bool = True,
        clock: StepClock | None = None,
    ) -> "HybridDrafter":
        """The drafter that a configuration describes, with its own suffix cache.

        token_strings: decoded text of every token id, in order; only read by policies that predict.
        deterministic: equal calls give equal plans, as several ranks need.

        Raises ValueError for a predictor file that cannot be used with this configuration.
        """
        predictor = token_classes = None
        if config.predicts:
            predictor = PayoffPredictor.of_config(config)
            token_classes = TokenClasses.from_strings(token_strings)
        return cls(
            config,
            cache=SuffixCache.of_config(config, deterministic=deterministic),
            predictor=predictor,
            token_classes=token_classes,
            num_model_steps=num_model_steps,
            num_model_nodes=num_model_nodes,
            verify_width=verify_width,
            allocator=allocator,
            verifies_trees=verifies_trees,
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

    def branch_share(self) -> float | None:
        """How right the votes are found to be beside the chain (docs/allocation.md); None where
        drafts do not branch."""
        return self._branch_payoff.share if self._has_branches else None

    def read_predictor(self, path: Path) -> PayoffPredictor:
        """A predictor that use_predictor takes.

        Raises ValueError, in one line, if the policy has no use for one, or for a file that cannot
        be used with this configuration.
        """
        if not self._config.predicts:
            raise ValueError(f"the {self._config.policy} policy has no predictor to replace")
        predictor = PayoffPredictor.of_config(self._config.model_copy(update={"predictor": path}))
        if self._allocator is not None:
            check_distribution(predictor)
        return predictor

    def use_predictor(self, predictor: PayoffPredictor) -> None:
        """Predicts with this one from the next plan on, and calibrates it from the start. Active
        requests stay, and so does what is known of the model drafter."""
        self._predictor = predictor
        self._branch_payoff = BranchPayoff()  # of what this predictor leaves to branches
        if self._config.calibrate:
            threshold = self._config.threshold if self._config.policy == "payoff" else None
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
        if self._allocator is not None:
            self._allocator.start(slot)
        self._requests[rid] = _Request(slot, without_cache)

    def plan(self, rids: Sequence[Hashable]) -> list[DraftPlan]:
        """Decides what each request of the batch verifies in its next cycle.

        Raises KeyError for a request that is not active.
        """
        if self._config.policy == "model":
            self._reserve(len(rids))
            self._drafts.num_nodes[: len(rids)] = 0
            return self.allocate(rids, Proposals(len(rids), self._drafts, None, None))
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
            is_read = self._tracker is not None
            self._cache.propose_into(self._drafts, rids, limits, with_evidence=is_read)
            if self._votes is not self._drafts:
                self._cache.propose_into(
                    self._votes, rids, limits, by_votes=True, with_evidence=is_read
                )
            if self._has_branches:
                most = max(_BRANCH_NODES // max(len(rids), 1), _FEWEST_BRANCH_NODES)
                limits = np.full(len(rids), min(most, self._max_cache_draft_tokens), np.int32)
                self._cache.propose_into(self._branches, rids, limits, is_tree=True)
        if self._tracker is None:
            return Proposals(len(rids), self._drafts, None, None)
        with self._clock.measure(Phase.FEATURES):
            features = self._features.first(len(rids))
            slots = self._slots(map(self._request, rids))
            self._tracker.write_features(features, slots, self._drafts, self._votes)
        if self._predictor is None:
            return Proposals(len(rids), self._drafts, features, None)
        with self._clock.measure(Phase.PREDICT):
            prediction = self._predictor.predict(features)
            if self._calibration is not None:
                prediction = self._calibration.expect(slots, self._drafts, prediction)
            model_payoffs = trees = model_reaches = None
            if self._model_payoff is not None:
                survival = self._heeded(prediction, len(rids))
                model_payoffs = self._model_payoff.expect(slots, self._drafts, survival)
                if self._allocator is not None:
                    assert survival is not None, "checked when the predictor was taken"
                    model_reaches = self._model_payoff.expect_sizes(slots, self._drafts, survival)
                    trees = self._trees
                    share = self._branch_payoff.share
                    trees.join(self._drafts, survival, self._branches, share)
        return Proposals(
            len(rids), self._drafts, features, prediction, model_payoffs, trees, model_reaches
        )

    def allocate(self, rids: Sequence[Hashable], proposals: Proposals) -> list[DraftPlan]:
        """The second half of plan: the policy's decision."""
        with self._clock.measure(Phase.ALLOCATE):
            requests = [self._request(rid) for rid in rids]
            payoffs: list[float | None] = [None] * len(requests)
            if proposals.prediction is not None:
                payoffs = proposals.of_drafts(proposals.prediction.payoffs)
            if self._allocator is not None:
                plans = self._by_cost(self._allocator, requests, proposals, payoffs)
            else:
                plans = self._by_policy(requests, proposals, payoffs)
            draft_lens = proposals.drafts.num_nodes[: len(requests)].tolist()
            for request, plan, draft_len in zip(requests, plans, draft_lens, strict=True):
                request.planned, request.draft_len = plan, draft_len
                if self._allocator is None and plan.cache_draft is not None:
                    request.chain = plan.cache_draft.token_ids
                    request.chain_len = plan.cache_draft.num_tokens
            return plans

    def commit(self, rids: Sequence[Hashable], outcomes: Sequence[VerifyOutcome]) -> None:
        """Takes in what the target model made of the cycles planned last.

        Raises KeyError for a request that is not active, ValueError for invalid token ids; then
        nothing has changed.
        """
        requests = [self._request(rid) for rid in rids]
        assert all(r.planned is not None for r in requests), (
            "a cycle must be planned before it is committed"
        )
        token_ids, lengths = padded([outcome.token_ids for outcome in outcomes])
        self._cache.commit(rids, token_ids, lengths)
        if self._tracker is not None:
            slots = self._slots(requests)
            accepted = list(map(_cache_accepted, requests, outcomes))
            self._tracker.commit(
                slots, token_ids, lengths, list(map(_for_history, requests, accepted))
            )
            self._observe(requests, outcomes, accepted)
            if self._allocator is not None:
                self._allocator.observe(slots, lengths)
        for request, outcome in zip(requests, outcomes, strict=True):
            assert request.planned is not None
            request.stats = request.stats.after_cycle(request.planned.source, outcome)
            request.planned = None

    def extend(self, rid: Hashable, token_ids: TokenIds | Sequence[int]) -> None:
        """Takes in tokens committed outside a cycle: the one that prefill generates.

        Raises KeyError for a request that is not active, ValueError for invalid token ids.
        """
        request = self._request(rid)
        self._cache.commit([rid], [token_ids])
        if self._tracker is not None:
            self._tracker.extend(request.slot, as_token_ids(token_ids))
        request.stats = request.stats.after_tokens(len(token_ids))

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
        if self._allocator is not None:
            self._branches = DraftBatch.of_size(rows, self._max_cache_draft_tokens)
            self._trees = CacheTrees(rows, self._max_cache_draft_tokens)
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
            case "both":
                return [DraftSource.BOTH if has else DraftSource.MODEL for has in has_draft]
            case "allocate":
                raise AssertionError("the allocator decides")

    def _by_policy(
        self,
        requests: Sequence[_Request],
        proposals: Proposals,
        payoffs: Sequence[float | None],
    ) -> list[DraftPlan]:
        sources = self._decide(proposals, payoffs)
        num_nodes = proposals.drafts.num_nodes[: len(requests)].tolist()
        num_cache = np.zeros(len(requests), np.int32)
        for row, (request, source) in enumerate(zip(requests, sources, strict=True)):
            if request.without_cache:
                source = self._without_cache
            room = self._room
            if source is DraftSource.BOTH:
                room -= self._num_model_nodes
                if room == 0:
                    source = DraftSource.MODEL
            sources[row] = source
            if source in (DraftSource.CACHE, DraftSource.BOTH):
                num_cache[row] = min(num_nodes[row], room)
        model = self._num_model_nodes, self._num_model_steps
        return [
            DraftPlan(source, chosen, payoff)
            if source in (DraftSource.CACHE, DraftSource.PLAIN)
            else DraftPlan(source, chosen, payoff, *model)
            for source, chosen, payoff in zip(
                sources, proposals.drafts.chains(num_cache), payoffs, strict=True
            )
        ]

    def _by_cost(
        self,
        allocator: StepAllocator,
        requests: Sequence[_Request],
        proposals: Proposals,
        payoffs: Sequence[float | None],
    ) -> list[DraftPlan]:
        num = len(requests)
        trees, reaches = proposals.trees, proposals.model_reaches
        assert trees is not None
        assert reaches is not None
        is_pinned = None
        if any(request.without_cache for request in requests):
            is_pinned = np.array([request.without_cache for request in requests])
        found = allocator.allocate(
            self._slots(requests),
            DraftOdds(
                trees.probs[:num],
                trees.depths[:num],
                trees.num_nodes[:num],
                reaches.of_all,
                reaches.if_cache_right,
            ),
            is_pinned,
        )
        assert proposals.prediction is not None
        assert proposals.prediction.survival is not None
        # The predictor is judged by what it says itself of chains, heeded or not.
        taken = trees.take(found.num_cache, proposals.prediction.survival, proposals.drafts)
        chains = proposals.drafts.token_ids[:num, : max(*taken.chain_lens, 1)].copy()
        branch_share = self._branch_payoff.share  # changes when cycles are committed
        plans = []
        for row, (request, chosen, payoff, num_model) in enumerate(
            zip(requests, taken.drafts, payoffs, found.num_model.tolist(), strict=True)
        ):
            request.chain, request.chain_len = chains[row], taken.chain_lens[row]
            request.cache_expected = taken.chain_expected[row]
            request.branch_expected = taken.branch_expected[row] / branch_share
            if chosen is not None and request.chain_len == 0:
                # A branch alone: the first token that is committed tells of the chain's first.
                request.chain_len = min(1, int(proposals.drafts.num_nodes[row]))
                request.cache_expected = float(proposals.prediction.survival[row, 0])
            if not num_model:
                source = DraftSource.PLAIN if chosen is None else DraftSource.CACHE
                plans.append(DraftPlan(source, chosen, payoff))
                continue
            request.model_size = int(found.model_size[row])
            request.model_expected = float(found.model_expected[row])
            source = DraftSource.MODEL if chosen is None else DraftSource.BOTH
            plans.append(DraftPlan(source, chosen, payoff, num_model, found.num_steps))
        return plans

    def _heeded(self, prediction: Prediction, num_requests: int) -> npt.NDArray[np.float32] | None:
        """Probabilities of the cache drafts' tokens; what the votes say themselves where the
        predictor is not heeded."""
        survival = prediction.survival
        if survival is None or self._allocator is None:
            return survival
        if self._calibration is None or not self._calibration.has_fallback:
            return survival
        longest = min(self._drafts.probs.shape[1], MAX_DRAFT_LEN)
        is_off = np.array(self._calibration.is_fallback(self._drafts, num_requests))
        lengths = self._drafts.num_nodes[:num_requests, None]
        of_votes = self._drafts.probs[:num_requests, :longest]
        of_votes = np.where(np.arange(longest) < lengths, of_votes, 0)
        survival = survival.copy()
        survival[is_off, :longest] = of_votes[is_off]
        return survival

    def _observe(
        self,
        requests: Sequence[_Request],
        outcomes: Sequence[VerifyOutcome],
        cache_accepted: Sequence[int | None],
    ) -> None:
        if self._model_payoff is None and self._calibration is None:
            return
        # Requests that never verify cache drafts tell nothing of those that do.
        told = [row for row, request in enumerate(requests) if not request.without_cache]
        slots = self._slots(requests[row] for row in told)
        token_ids = [outcomes[row].token_ids for row in told]
        is_cut = self._allocator is not None
        if self._model_payoff is not None:
            of_model = [_model_verified(requests[row], outcomes[row], is_cut) for row in told]
            self._model_payoff.observe(slots, token_ids, of_model)
        if self._has_branches and self._config.calibrate:
            for row in told:
                self._observe_branches(requests[row], outcomes[row], cache_accepted[row])
        if self._calibration is not None:
            of_cache = [_cache_verified(requests[row], cache_accepted[row], is_cut) for row in told]
            for change in self._calibration.observe(slots, token_ids, of_cache):
                _log(change)

    def _observe_branches(
        self, request: _Request, outcome: VerifyOutcome, chain_accepted: int | None
    ) -> None:
        """Of both drafts in one tree a cycle does not tell whose tokens were accepted."""
        plan = request.planned
        assert plan is not None
        if plan.source is not DraftSource.CACHE or request.branch_expected == 0:
            return
        # A chain whose first token was right but not verified had nothing accepted.
        num_accepted = max(outcome.num_accepted_drafts - (chain_accepted or 0), 0)
        self._branch_payoff.observe(request.branch_expected, num_accepted)


def _cache_accepted(request: _Request, outcome: VerifyOutcome) -> int | None:
    """Tokens of the cache draft's chain that were right; None if none of it was verified."""
    plan = request.planned
    assert plan is not None, "a cycle must be planned before it is committed"
    if plan.cache_draft is None or not request.chain_len:
        return None
    if plan.source is DraftSource.CACHE and plan.cache_draft.parents is None:
        return outcome.num_accepted_drafts
    return num_agreeing(request.chain[: request.chain_len], as_token_ids(outcome.token_ids))


def _for_history(request: _Request, num_accepted: int | None) -> int | None:
    """The predictor's features are of whole drafts: a part that was accepted whole tells less."""
    if num_accepted is None:
        return None
    is_cut = request.chain_len < request.draft_len
    return None if is_cut and num_accepted == request.chain_len else num_accepted


def _cache_verified(
    request: _Request, num_accepted: int | None, is_cut: bool
) -> VerifiedCacheDraft | int | None:
    if num_accepted is None or not is_cut:
        return num_accepted
    return VerifiedCacheDraft(num_accepted, request.chain_len, request.cache_expected)


def _model_verified(
    request: _Request, outcome: VerifyOutcome, is_cut: bool
) -> VerifiedModelDraft | int | None:
    plan = request.planned
    assert plan is not None
    if plan.num_model_nodes == 0:
        return None
    num_accepted: int | None = outcome.num_accepted_drafts
    if plan.source is DraftSource.BOTH:
        num_accepted = outcome.num_model_accepted
    if num_accepted is None or not is_cut:
        return num_accepted
    return VerifiedModelDraft(
        num_accepted, request.model_size, plan.num_model_steps, request.model_expected
    )


def check_distribution(predictor: PayoffPredictor) -> None:
    """Raises ValueError for a predictor that the allocate policy cannot use."""
    if predictor.kind != "survival":
        raise ValueError(
            f"the allocate policy needs a predictor of distributions, got one of kind "
            f"{predictor.kind}: use policy payoff with it"
        )


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
