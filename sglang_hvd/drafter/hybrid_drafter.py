"""The drafter of a server: the life of its requests, and what each verifies from cycle to cycle."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sglang_hvd._native import StepCore
from sglang_hvd.allocation import StepAllocator
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter.expected_gains import gains_by_costs, gains_by_rule
from sglang_hvd.drafter.planner import Planner, rule_of
from sglang_hvd.drafter.proposer import Proposals, Proposer, asks_votes
from sglang_hvd.drafter.request import DraftedBatch, DraftedRequest
from sglang_hvd.drafter.sources import CacheSource, ModelSource, log_change
from sglang_hvd.payoff import (
    AcceptancePredictor,
    FallbackChange,
    ModelFigures,
    ModelPredictor,
    OriginFigures,
    RequestTracker,
    TokenClasses,
)
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.request_stats import RequestStats
from sglang_hvd.step_clock import Phase, StepClock
from sglang_hvd.suffix_cache import SuffixCache, SuffixCacheStats
from sglang_hvd.suffix_cache.token_ids import as_token_ids
from sglang_hvd.types import (
    SOURCES,
    DraftLimits,
    DraftPlans,
    Places,
    SourceTable,
    TokenIds,
    VerifyOutcomes,
)


class HybridDrafter:
    """Life of a request: start, then plan and commit for each cycle, then finish.

    plan and commit take the whole running batch. Not thread-safe.
    """

    def __init__(
        self,
        config: HvdConfig,
        *,
        cache: SuffixCache,
        predictor: AcceptancePredictor | None,
        token_classes: TokenClasses | None,
        num_model_steps: int,
        num_model_nodes: int,
        verify_width: int,
        allocator: StepAllocator | None = None,
        verifies_trees: bool = True,
        clock: StepClock | None = None,
        sources: SourceTable = SOURCES,
    ) -> None:
        """
        predictor: needed by the policies allocate, which takes one of distributions, and payoff;
            None for the others.
        token_classes: needed by a predictor; without them no features are computed.
        num_model_steps: steps the model drafter runs in a cycle.
        num_model_nodes: nodes of its draft, root not included.
        verify_width: maximum nodes per request in one verification, root included. An allocator
            may allow fewer for many requests.
        allocator: needed by the policy allocate.
        verifies_trees: whether cache drafts may branch.
        clock: measures what plan does.
        sources: the draft sources; those on the device are the allocator's drafters, in order.
        """
        if config.predicts and (predictor is None or token_classes is None):
            raise ValueError(f"the {config.policy} policy needs a predictor and token classes")
        if predictor is not None and not config.predicts:
            raise ValueError(f"the {config.policy} policy uses no predictor: pass None")
        self._config, self._suffix_cache = config, cache
        self._clock = clock or StepClock()
        self._requests: dict[Hashable, DraftedRequest] = {}
        self._batch: DraftedBatch | None = None
        self._labels = sources.labels
        self._tracker = (
            None if token_classes is None else RequestTracker(config.history_window, token_classes)
        )
        self._allocator: StepAllocator | None = None
        self._cache = CacheSource(config, predictor)
        self._models: list[ModelSource] = []
        room = verify_width - 1
        max_cache_draft_tokens = min(config.max_draft_tokens, room)
        if config.policy == "allocate":
            if allocator is None:
                raise ValueError("the allocate policy needs an allocator")
            self._allocator = allocator
            # The model drafter's predictor covers its full draft, whose steps may not be a choice.
            of_model, *others = allocator.drafters
            num_steps = [num_model_steps, *(choices.num_steps[-1] for choices in others)]
            self._models = [
                ModelSource(bit, ModelPredictor(steps, choices.sizes))
                for bit, steps, choices in zip(
                    sources.device_bits, num_steps, (of_model, *others), strict=True
                )
            ]
            # The predictor covers only the first MAX_DRAFT_LEN tokens.
            max_cache_draft_tokens = min(max_cache_draft_tokens, MAX_DRAFT_LEN)
        elif config.policy == "payoff":
            self._models = [ModelSource(sources.device_bits[0], ModelPredictor(num_model_steps))]
        has_features = self._tracker is not None
        self._core = StepCore(
            cache.core,
            None if self._tracker is None else self._tracker.native,
            [model.for_core() for model in self._models],
            None if self._allocator is None else self._allocator.native,
            rule_of(
                config,
                drafter=sources.device_bits[0],
                room=room,
                num_model_steps=num_model_steps,
                num_model_nodes=num_model_nodes,
            ),
            len(sources.labels),
            SOURCES.bit_of("cache"),
            asks_votes(config, has_features=has_features),
        )
        self._use_in_core()
        self._proposer = Proposer(
            config,
            self._core,
            self._cache,
            self._models,
            has_features=has_features,
            max_cache_draft_tokens=max_cache_draft_tokens,
            # SuffixDecoding drafts chains only, and its votes are not the predictor's.
            has_branches=self._allocator is not None
            and config.branches
            and config.cache_mode == "votes"
            and verifies_trees,
            clock=self._clock,
        )
        self._planner = Planner(self._core, self._allocator, sources)

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

        token_strings: what each token adds to a text, in order; only read by policies that predict.
        deterministic: equal calls give equal plans, as several ranks need.

        Raises ValueError for a predictor file that cannot be used with this configuration.
        """
        predictor = token_classes = None
        if config.predicts:
            predictor = AcceptancePredictor.of_config(config)
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
    def suffix_cache(self) -> SuffixCache:
        """The cache that it drafts from, with the texts of its requests."""
        return self._suffix_cache

    @property
    def num_requests(self) -> int:
        """Active requests: started and not finished."""
        return len(self._requests)

    @property
    def predictor(self) -> AcceptancePredictor | None:
        """The predictor in use."""
        return self._cache.predictor

    def calibration(self) -> Mapping[str, OriginFigures] | None:
        """How accurate the predictor is, by origin of the draft; None if it is not calibrated."""
        return self._cache.figures()

    def model_figures(self) -> ModelFigures | None:
        """How accurate the predictions for the model drafter are; None without any."""
        return self._models[0].figures() if self._models else None

    def read_predictor(self, path: Path) -> AcceptancePredictor:
        """A predictor that use_predictor takes.

        Raises ValueError, in one line, if the policy has no use for one, or for a file that cannot
        be used with this configuration.
        """
        if not self._config.predicts:
            raise ValueError(f"the {self._config.policy} policy has no predictor to replace")
        return AcceptancePredictor.of_config(self._config.model_copy(update={"predictor": path}))

    def use_predictor(self, predictor: AcceptancePredictor) -> None:
        """Predicts with this one from the next plan on, and calibrates it from the start. Active
        requests stay, and so does what was learned about the model drafter."""
        self._cache.use_predictor(predictor)
        self._use_in_core()

    def start(
        self,
        rid: Hashable,
        prompt_ids: TokenIds | Sequence[int],
        *,
        namespace: str = "",
        limits: DraftLimits | None = None,
        learns: bool = True,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Starts a request. Raises ValueError if rid is active or prompt_ids are no token ids.

        namespace: the request sees only outputs of finished requests with the same namespace.
        limits: what it may verify; None: what the policy chooses.
        learns: the tracker, the calibration and the sources may learn from its cycles.
        num_prompt_tokens: tokens of the prompt as the target model sees it, if prompt_ids do not
            hold all of them, as with images.
        """
        self._suffix_cache.start(rid, prompt_ids, namespace)
        # Requests whose drafts the policy does not choose say nothing about those of others.
        teaches = learns and limits is None
        slot = 0
        if self._tracker is not None:
            slot = self._tracker.start(
                as_token_ids(prompt_ids), namespace=namespace, teaches=teaches
            )
        for model in self._models:
            model.start(slot)
        if self._allocator is not None:
            self._allocator.start(slot)
        if num_prompt_tokens is None:
            num_prompt_tokens = len(prompt_ids)
        of_cache = self._suffix_cache.slot_of(rid)
        self._core.start(of_cache, num_prompt_tokens)
        self._requests[rid] = DraftedRequest(of_cache, slot, limits, teaches)
        self._batch = None

    def num_tokens(self, rid: Hashable) -> int:
        """Tokens of an active request, prompt and committed. Raises KeyError for any other."""
        return self._core.num_tokens(self._request(rid).of_cache)

    def lengths(self, rids: Sequence[Hashable]) -> npt.NDArray[np.int64]:
        """num_tokens of each request of a batch: int64[num_requests]."""
        found = np.empty(len(rids), np.int64)
        self._core.write_lengths(self._batch_of(rids).of_cache, found)
        return found

    def count_missing(self, rid: Hashable, num_missing: int) -> None:
        """Counts tokens that the request has and its text lacks: num_tokens, lengths and the price
        of its context include them. Raises KeyError for a request that is not active."""
        self._core.extend(self._request(rid).of_cache, num_missing, False)

    def plan(
        self,
        rids: Sequence[Hashable],
        *,
        next_waits: bool = False,
        explains: Places = (),
    ) -> DraftPlans:
        """Decides what each request of the batch verifies in its next cycle: propose and choose.

        next_waits: the step after it cannot run ahead, whatever is decided.
        explains: rows for which the plans say what each choice was expected to gain.

        Raises KeyError for a request that is not active, ValueError if one is there twice.
        """
        if self._config.policy == "model":
            proposals = self._proposer.nothing(len(rids))
        else:
            proposals = self.propose(rids)
        return self.choose(rids, proposals, next_waits=next_waits, explains=explains)

    def propose(
        self, rids: Sequence[Hashable], max_cache_draft_tokens: int | None = None
    ) -> Proposals:
        """The first half of plan: cache drafts, their features and predicted acceptance.

        max_cache_draft_tokens: a lower limit than this drafter's.

        Raises KeyError for a request that is not active, ValueError if one is there twice.
        """
        limits = [self._proposer.max_cache_draft_tokens]
        if self._allocator is not None:
            limits.append(self._allocator.widest(len(rids)) - 1)
        if max_cache_draft_tokens is not None:
            limits.append(max_cache_draft_tokens)
        return self._proposer.propose(self._batch_of(rids), min(limits))

    def choose(
        self,
        rids: Sequence[Hashable],
        proposals: Proposals,
        *,
        next_waits: bool = False,
        explains: Places = (),
    ) -> DraftPlans:
        """The second half of plan: the policy's decision."""
        with self._clock.measure(Phase.ALLOCATE):
            batch = self._batch_of(rids)
            plans = self._planner.choose(batch, proposals, next_waits=next_waits)
            if not len(explains):
                return plans
            if self._allocator is None:
                expected = gains_by_rule(plans, proposals, self._config.policy)
            else:
                drafters = self._allocator.drafters
                expected = gains_by_costs(plans, proposals, drafters, explains)
            return replace(plans, expected=expected)

    def plan_launched(self, rids: Sequence[Hashable]) -> bool:
        """Replaces plan for a step that was launched before its cycles were planned: none of them
        verifies a draft. Policy allocate only.

        Returns whether drafts would have been worth a wait, so that the next step should be
        planned. Raises KeyError for a request that is not active.
        """
        self.propose(rids)
        return self.choose_launched(rids)

    def choose_launched(self, rids: Sequence[Hashable]) -> bool:
        """The second half of plan_launched. The latest proposals are of these requests."""
        with self._clock.measure(Phase.ALLOCATE):
            return self._planner.wants_drafts(self._batch_of(rids))

    def commit(self, rids: Sequence[Hashable], outcomes: VerifyOutcomes) -> None:
        """Commits the outcomes of the cycles planned last; row i belongs to rids[i].

        Raises KeyError for a request that is not active, ValueError if one is there twice, for
        invalid token ids and for outcomes that disagree, TypeError for arrays of another type; then
        nothing has changed.
        """
        batch = self._batch_of(rids)
        if len(batch) != len(outcomes.lengths):
            raise ValueError(
                f"{len(batch)} requests and outcomes of {len(outcomes.lengths)}: each needs one"
            )
        assert self._core.are_planned(batch.of_cache), "a cycle is planned before it is committed"
        changes = self._core.commit(
            batch.of_cache,
            batch.of_rest,
            batch.teaches,
            outcomes.token_ids,
            outcomes.lengths,
            outcomes.num_accepted_drafts,
            outcomes.num_model_accepted,
        )
        for change in changes:
            log_change(FallbackChange.of(*change))

    def extend(
        self, rid: Hashable, token_ids: TokenIds | Sequence[int], *, counts: bool = True
    ) -> None:
        """Commits tokens outside a cycle: the one that prefill generates.

        counts: the request's stats count them.

        Raises KeyError for a request that is not active, ValueError for invalid token ids.
        """
        request = self._request(rid)
        self._suffix_cache.commit([rid], [token_ids])
        if self._tracker is not None:
            self._tracker.extend(request.of_rest, as_token_ids(token_ids))
        self._core.extend(request.of_cache, len(token_ids), counts)

    def finish(
        self, rid: Hashable, *, output_ids: TokenIds | Sequence[int] | None, keep: bool
    ) -> RequestStats:
        """Forgets a request and returns its counts; keep: its output enters the shared cache.

        output_ids: the output to keep; None: all tokens committed since the prompt.

        Raises KeyError for a request that is not active.
        """
        stats = self.stats(rid)
        self._suffix_cache.finish(rid, keep=keep, output_ids=output_ids)
        if self._tracker is not None:
            self._tracker.finish(self._requests[rid].of_rest)
        del self._requests[rid]
        self._batch = None
        return stats

    def flush(self) -> None:
        """Empties the shared cache, and forgets how accurate its drafts were. Active requests keep
        their own texts."""
        self._suffix_cache.flush()
        if self._tracker is not None:
            self._tracker.forget()

    def cache_stats(self) -> SuffixCacheStats:
        """The contents of the suffix cache, in numbers."""
        return self._suffix_cache.stats()

    def stats(self, rid: Hashable) -> RequestStats:
        """The counts of an active request so far. Raises KeyError for any other."""
        return self._stats_of(self._request(rid).of_cache)

    def stats_of_all(self) -> RequestStats:
        """The counts of all requests so far, ended ones included."""
        return self._stats_of(None)

    def _stats_of(self, slot: int | None) -> RequestStats:
        cycles, accepted, num_target_tokens = self._core.counts(slot)
        labels = self._labels
        return RequestStats(
            {label: num for label, num in zip(labels, cycles, strict=True) if num},
            {label: num for label, num in zip(labels, accepted, strict=True) if num},
            num_target_tokens,
        )

    def _request(self, rid: Hashable) -> DraftedRequest:
        if rid not in self._requests:
            raise KeyError(f"request {rid!r} is not active: start it first")
        return self._requests[rid]

    def _batch_of(self, rids: Sequence[Hashable]) -> DraftedBatch:
        """The requests of a step. They are mostly those of the last step."""
        if self._batch is None or not self._batch.has_only(rids):
            self._batch = DraftedBatch.of(tuple(rids), [self._request(rid) for rid in rids])
        return self._batch

    def _use_in_core(self) -> None:
        predictor, calibration = self._cache.predictor, self._cache.calibration
        self._core.use_predictor(
            None if predictor is None else predictor.network,
            predictor is not None and predictor.kind == "survival",
            None if calibration is None else calibration.native,
        )
