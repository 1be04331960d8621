"""The drafter of a server: the life of its requests, and what each verifies from cycle to cycle."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from sglang_hvd.allocation import StepAllocator
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter.cost_planner import CostPlanner
from sglang_hvd.drafter.cycles import Cycles
from sglang_hvd.drafter.payoff_estimator import PayoffEstimator
from sglang_hvd.drafter.proposals import Proposals
from sglang_hvd.drafter.proposer import Proposer
from sglang_hvd.drafter.request import DraftedRequest, cycles_of, slots_of
from sglang_hvd.drafter.rule_planner import RulePlanner
from sglang_hvd.payoff import (
    AcceptancePredictor,
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
from sglang_hvd.suffix_cache.token_ids import as_token_ids, padded
from sglang_hvd.types import DraftPlans, TokenIds, VerifyOutcome, VerifyOutcomes


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
    ) -> None:
        """
        predictor: needed by the policies allocate, which takes one of distributions, and payoff;
            None for the others.
        token_classes: needed by a predictor; without them no features are computed.
        num_model_steps: steps the model drafter runs in a cycle.
        num_model_nodes: nodes of its draft, root not included.
        verify_width: most nodes per request that one verification takes, root included. An
            allocator may know of fewer for many requests.
        allocator: needed by the policy allocate.
        verifies_trees: whether cache drafts may branch.
        clock: measures what plan does.
        """
        if config.predicts and (predictor is None or token_classes is None):
            raise ValueError(f"the {config.policy} policy needs a predictor and token classes")
        if predictor is not None and not config.predicts:
            raise ValueError(f"the {config.policy} policy uses no predictor: pass None")
        self._config, self._cache = config, cache
        self._clock = clock or StepClock()
        self._requests: dict[Hashable, DraftedRequest] = {}
        self._tracker = (
            None if token_classes is None else RequestTracker(config.history_window, token_classes)
        )
        self._allocator: StepAllocator | None = None
        model_predictor: ModelPredictor | None = None
        room = verify_width - 1
        max_cache_draft_tokens = min(config.max_draft_tokens, room)
        if config.policy == "allocate":
            if allocator is None:
                raise ValueError("the allocate policy needs an allocator")
            self._allocator = allocator
            model_predictor = ModelPredictor(num_model_steps, allocator.model_sizes)
            # Of the tokens behind nothing is known.
            max_cache_draft_tokens = min(max_cache_draft_tokens, MAX_DRAFT_LEN)
        elif config.policy == "payoff":
            model_predictor = ModelPredictor(num_model_steps)
        # SuffixDecoding drafts chains only, and its votes are not the predictor's.
        has_branches = (
            self._allocator is not None
            and config.branches
            and config.cache_mode == "votes"
            and verifies_trees
        )
        estimator = self._estimator = PayoffEstimator(config, predictor, model_predictor)
        self._proposer = Proposer(
            config,
            cache,
            self._tracker,
            estimator,
            max_cache_draft_tokens=max_cache_draft_tokens,
            has_branches=has_branches,
            clock=self._clock,
        )
        self._planner: CostPlanner | RulePlanner
        if self._allocator is not None:
            self._planner = CostPlanner(self._allocator)
        else:
            self._planner = RulePlanner(
                config,
                estimator,
                room=room,
                num_model_steps=num_model_steps,
                num_model_nodes=num_model_nodes,
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
    def num_requests(self) -> int:
        """Active requests: started and not finished."""
        return len(self._requests)

    @property
    def predictor(self) -> AcceptancePredictor | None:
        """The predictor in use."""
        return self._estimator.predictor

    def calibration(self) -> Mapping[str, OriginFigures] | None:
        """How right the predictor is, by origin of the draft; None where it is not calibrated."""
        return self._estimator.calibration()

    def model_figures(self) -> ModelFigures | None:
        """How right the predictions of the model drafter's payoff are; None without any."""
        return self._estimator.model_figures()

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
        requests stay, and so does what is known of the model drafter."""
        self._estimator.use_predictor(predictor)

    def start(
        self,
        rid: Hashable,
        prompt_ids: TokenIds | Sequence[int],
        *,
        namespace: str = "",
        without_cache: bool = False,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Takes in a request. Raises ValueError if rid is active or prompt_ids are no token ids.

        namespace: it sees outputs of finished requests with the same one only.
        without_cache: never verify its cache drafts, whatever the policy.
        num_prompt_tokens: of the prompt as the target model sees it, where prompt_ids do not hold
            it, as with images.
        """
        self._cache.start(rid, prompt_ids, namespace)
        slot = 0
        if self._tracker is not None:
            # Requests that never verify cache drafts, as those whose penalties keep them from
            # copying, tell nothing of those that do.
            slot = self._tracker.start(
                as_token_ids(prompt_ids), namespace=namespace, teaches=not without_cache
            )
        self._estimator.start(slot)
        if self._allocator is not None:
            self._allocator.start(slot)
        if num_prompt_tokens is None:
            num_prompt_tokens = len(prompt_ids)
        self._requests[rid] = DraftedRequest(slot, without_cache, num_prompt_tokens)

    def plan(self, rids: Sequence[Hashable], *, next_waits: bool = False) -> DraftPlans:
        """Decides what each request of the batch verifies in its next cycle.

        next_waits: the step after it cannot run ahead, whatever is decided.

        Raises KeyError for a request that is not active.
        """
        if self._config.policy == "model":
            return self.allocate(rids, self._proposer.nothing(len(rids)))
        return self.allocate(rids, self.propose(rids), next_waits=next_waits)

    def propose(
        self, rids: Sequence[Hashable], max_cache_draft_tokens: int | None = None
    ) -> Proposals:
        """The first half of plan: cache drafts, their features and predicted payoffs.

        max_cache_draft_tokens: a lower limit than this drafter's.

        Raises KeyError for a request that is not active.
        """
        requests = [self._request(rid) for rid in rids]
        limits = [self._proposer.max_cache_draft_tokens]
        if self._allocator is not None:
            limits.append(self._allocator.widest(len(rids)) - 1)
        if max_cache_draft_tokens is not None:
            limits.append(max_cache_draft_tokens)
        return self._proposer.propose(rids, requests, min(limits))

    def allocate(
        self, rids: Sequence[Hashable], proposals: Proposals, *, next_waits: bool = False
    ) -> DraftPlans:
        """The second half of plan: the policy's decision."""
        with self._clock.measure(Phase.ALLOCATE):
            requests = [self._request(rid) for rid in rids]
            if isinstance(self._planner, CostPlanner):
                plans, cycles = self._planner.plan(requests, proposals, next_waits=next_waits)
            else:
                plans, cycles = self._planner.plan(requests, proposals)
            _begin(cycles, requests)
            return plans

    def plan_launched(self, rids: Sequence[Hashable]) -> bool:
        """Takes the place of plan for a step that was launched before its cycles were planned: none
        of them verifies a draft. Policy allocate only.

        Returns whether drafts would have been worth a wait, so that the next step should be
        planned. Raises KeyError for a request that is not active.
        """
        return self.allocate_launched(rids, self.propose(rids))

    def allocate_launched(self, rids: Sequence[Hashable], proposals: Proposals) -> bool:
        """The second half of plan_launched."""
        assert isinstance(self._planner, CostPlanner), "only allocate decides by costs"
        with self._clock.measure(Phase.ALLOCATE):
            requests = [self._request(rid) for rid in rids]
            cycles, wants_drafts = self._planner.plan_launched(requests, proposals)
            _begin(cycles, requests)
            return wants_drafts

    def commit(self, rids: Sequence[Hashable], outcomes: Sequence[VerifyOutcome]) -> None:
        """Takes in what the target model made of the cycles planned last.

        Raises KeyError for a request that is not active, ValueError for invalid token ids; then
        nothing has changed.
        """
        token_ids, lengths = padded([outcome.token_ids for outcome in outcomes])
        of_model = [outcome.num_model_accepted for outcome in outcomes]
        self.commit_batch(
            rids,
            VerifyOutcomes(
                token_ids,
                lengths,
                np.array([outcome.num_accepted_drafts for outcome in outcomes], np.int32),
                np.array([-1 if num is None else num for num in of_model], np.int32),
            ),
        )

    def commit_batch(self, rids: Sequence[Hashable], outcomes: VerifyOutcomes) -> None:
        """The same of outcomes that lie in arrays, as a server has them."""
        requests = [self._request(rid) for rid in rids]
        if len(requests) != len(outcomes.lengths):
            raise ValueError(
                f"{len(requests)} requests and outcomes of {len(outcomes.lengths)}: each needs one"
            )
        if not requests:
            return
        cycles = cycles_of(requests)
        self._cache.commit(rids, outcomes.token_ids, outcomes.lengths)
        if self._tracker is not None:
            slots = slots_of(requests)
            chain_accepted = self._tracker.commit(
                slots, outcomes.token_ids, outcomes.lengths, cycles.chain_lens
            )
            self._estimator.observe(requests, slots, cycles, outcomes, chain_accepted)
            if self._allocator is not None:
                self._allocator.observe(slots, outcomes.lengths)
        of_cycles = zip(
            requests,
            cycles.sources,
            outcomes.num_accepted_drafts.tolist(),
            outcomes.lengths.tolist(),
            strict=True,
        )
        for request, source, num_accepted, num_tokens in of_cycles:
            request.end_cycle(source, num_accepted, num_tokens)

    def extend(
        self, rid: Hashable, token_ids: TokenIds | Sequence[int], *, counts: bool = True
    ) -> None:
        """Takes in tokens committed outside a cycle: the one that prefill generates.

        counts: the request's stats count them.

        Raises KeyError for a request that is not active, ValueError for invalid token ids.
        """
        request = self._request(rid)
        self._cache.commit([rid], [token_ids])
        if self._tracker is not None:
            self._tracker.extend(request.slot, as_token_ids(token_ids))
        request.num_tokens += len(token_ids)
        if counts:
            request.counts.add_tokens(len(token_ids))

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
        """Empties the shared cache, and forgets how right drafts from it were. Active requests keep
        what is their own."""
        self._cache.flush()
        if self._tracker is not None:
            self._tracker.forget()

    def cache_stats(self) -> SuffixCacheStats:
        """What the suffix cache holds."""
        return self._cache.stats()

    def stats(self, rid: Hashable) -> RequestStats:
        """The counts of an active request so far. Raises KeyError for any other."""
        return self._request(rid).counts.stats()

    def _request(self, rid: Hashable) -> DraftedRequest:
        if rid not in self._requests:
            raise KeyError(f"request {rid!r} is not active: start it first")
        return self._requests[rid]


def _begin(cycles: Cycles, requests: Sequence[DraftedRequest]) -> None:
    for place, request in enumerate(requests):
        request.cycles, request.place = cycles, place
