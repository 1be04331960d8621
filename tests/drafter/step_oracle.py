"""A decode step in Python, with one call of each part: the oracle of StepCore."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import HostTrees, PredictedDrafts, RowLimits, StepAllocator
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter import ChainPrediction, Proposals
from sglang_hvd.drafter.request import BatchLimits, DraftedRequest, limits_of
from sglang_hvd.drafter.sources import CacheSource
from sglang_hvd.payoff import (
    AcceptancePredictor,
    DraftFeatures,
    ModelAcceptance,
    ModelPredictor,
    Prediction,
    RequestTracker,
    TokenClasses,
    VerifiedModelDrafts,
)
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import SOURCES, DraftBatch, DraftLimits, DraftPlans, VerifyOutcomes
from tests.drafter.rule_oracle import RuleOracle, fallbacks, max_branches, max_chains

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Proposed:
    """chains: cache drafts. prediction: for them. trees, of_model: what the allocator weighs."""

    chains: DraftBatch
    prediction: Prediction
    trees: HostTrees
    of_model: ModelAcceptance


class Oracle:
    """What all policies have in common.

    predictor: None for a policy that predicts nothing; it then learns nothing either.
    model: predicts the model drafter's acceptance; None for the same policies.
    """

    def __init__(
        self,
        config: HvdConfig,
        predictor: AcceptancePredictor | None,
        classes: TokenClasses,
        model: ModelPredictor | None,
        longest: int,
    ) -> None:
        self.cache = SuffixCache.of_config(config, background=False)
        self.tracker = RequestTracker(config.history_window, classes)
        self.source, self.model = CacheSource(config, predictor), model
        self._longest, self._by_votes = longest, config.cache_mode == "votes"
        self._requests: dict[str, DraftedRequest] = {}
        self._num_tokens: dict[str, int] = {}
        self._plans: dict[str, tuple[DraftPlans, int]] = {}

    def start(
        self, rid: str, prompt: Sequence[int], *, limits: DraftLimits | None, learns: bool
    ) -> None:
        self.cache.start(rid, prompt)
        teaches = learns and limits is None
        slot = self.tracker.start(np.array(prompt, np.int32), teaches=teaches)
        if self.model is not None:
            self.model.start(slot)
        self._requests[rid] = DraftedRequest(self.cache.slot_of(rid), slot, limits, teaches)
        self._num_tokens[rid] = len(prompt)

    def finish(self, rid: str) -> None:
        self.cache.finish(rid, keep=True)
        self.tracker.finish(self._requests.pop(rid).of_rest)

    def commit(self, rids: Sequence[str], outcomes: VerifyOutcomes) -> None:
        planned = [self._plans.pop(rid) for rid in rids]
        plans = DraftPlans.concatenate([of.select([row]) for of, row in planned])
        slots = self._slots(rids)
        self.cache.commit(rids, outcomes.token_ids, outcomes.lengths)
        chain_accepted = self.tracker.commit(
            slots, outcomes.token_ids, outcomes.lengths, plans.chain_lens
        )
        told = np.flatnonzero([self._requests[rid].teaches for rid in rids])
        self._observe(slots[told], plans.select(told), outcomes.select(told), chain_accepted[told])
        for rid, length in zip(rids, outcomes.lengths.tolist(), strict=True):
            self._num_tokens[rid] += length

    def _observe(
        self, slots: Int32, plans: DraftPlans, outcomes: VerifyOutcomes, chain_accepted: Int32
    ) -> None:
        if self.model is None:
            return
        accepted = np.where(
            plans.drafts.num_nodes > 0, outcomes.num_model_accepted, outcomes.num_accepted_drafts
        )
        accepted[plans.num_model_nodes == 0] = -1
        verified = VerifiedModelDrafts(plans.model_sizes, plans.model_steps, plans.model_predicted)
        self.model.observe(slots, outcomes.token_ids, outcomes.lengths, accepted, verified)
        assert self.source.calibration is not None
        self.source.calibration.observe(
            slots,
            outcomes.token_ids,
            outcomes.lengths,
            chain_accepted,
            plans.chain_lens,
            plans.chain_predicted,
        )

    def _chains(self, rids: Sequence[str], limit: int) -> tuple[DraftBatch, DraftFeatures]:
        """What the cache proposes, and its features. Those of the paper's drafts also need what
        the votes would propose."""
        num, slots, asked = len(rids), self._slots(rids), self._asked(rids)
        limits = np.full(num, limit, np.int32) if asked is None else max_chains(asked, limit)
        chains = DraftBatch.of_size(num, self._longest)
        self.cache.propose_into(chains, rids, limits, with_evidence=True)
        votes = chains
        if not self._by_votes:
            votes = DraftBatch.of_size(num, self._longest)
            self.cache.propose_into(votes, rids, limits, by_votes=True, with_evidence=True)
        features = DraftFeatures.of_size(num)
        self.tracker.write_features(features, slots, chains, votes)
        return chains, features

    def _predict(self, slots: Int32, chains: DraftBatch, features: DraftFeatures) -> Prediction:
        assert self.source.predictor is not None
        assert self.source.calibration is not None
        found = self.source.predictor.predict(features)
        return self.source.calibration.correct(slots, chains, found)

    def _asked(self, rids: Sequence[str]) -> BatchLimits | None:
        return limits_of([self._requests[rid] for rid in rids])

    def _slots(self, rids: Sequence[str]) -> Int32:
        return np.array([self._requests[rid].of_rest for rid in rids], np.int32)


class RuleDrafter(Oracle):
    """The policies by rule."""

    def __init__(
        self,
        config: HvdConfig,
        predictor: AcceptancePredictor | None,
        classes: TokenClasses,
        *,
        num_steps: int,
        num_nodes: int,
        longest: int,
        room: int,
    ) -> None:
        model = None if predictor is None else ModelPredictor(num_steps)
        super().__init__(config, predictor, classes, model, longest)
        self._rule = RuleOracle(
            config, self.source, room=room, num_model_steps=num_steps, num_model_nodes=num_nodes
        )

    def plan(self, rids: Sequence[str], *, next_waits: bool) -> DraftPlans:
        if self._rule.policy == "model":
            chains, features = DraftBatch.of_size(len(rids), self._longest), None
        else:
            chains, features = self._chains(rids, self._longest)
        predicted = None
        if self.model is not None:
            slots = self._slots(rids)
            prediction = self._predict(slots, chains, features)
            lens = self.model.predict(slots, chains, prediction.acceptance)
            predicted = ChainPrediction(prediction, lens)
        proposals = Proposals(len(rids), chains, features, predicted)
        plans = self._rule.choose(proposals, self._asked(rids))
        self._plans |= {rid: (plans, row) for row, rid in enumerate(rids)}
        return plans


class OracleDrafter(Oracle):
    """Policy allocate, step by step. num_branch_nodes: of a whole batch."""

    def __init__(
        self,
        config: HvdConfig,
        predictor: AcceptancePredictor,
        classes: TokenClasses,
        allocator: StepAllocator,
        *,
        num_steps: int,
        longest: int,
        num_branch_nodes: int = 512,
    ) -> None:
        self.of_model = ModelPredictor(num_steps, allocator.drafters[0].sizes)
        super().__init__(config, predictor, classes, self.of_model, longest)
        self.allocator, self._num_branch_nodes = allocator, num_branch_nodes

    def start(
        self, rid: str, prompt: Sequence[int], *, limits: DraftLimits | None, learns: bool
    ) -> None:
        super().start(rid, prompt, limits=limits, learns=learns)
        self.allocator.start(self._requests[rid].of_rest)

    def commit(self, rids: Sequence[str], outcomes: VerifyOutcomes) -> None:
        super().commit(rids, outcomes)
        self.allocator.observe(self._slots(rids), outcomes.lengths)

    def plan(self, rids: Sequence[str], *, next_waits: bool) -> DraftPlans:
        proposed, slots = self._propose(rids), self._slots(rids)
        found = self.allocator.allocate(
            slots,
            self._predicted(proposed, len(rids)),
            self._limits(rids, proposed),
            num_context=sum(self._num_tokens[rid] for rid in rids),
            next_waits=next_waits,
        )
        acceptance = proposed.prediction.acceptance
        assert acceptance is not None
        taken = proposed.trees.take(
            found.num_host, acceptance, proposed.chains, width=found.max_host
        )
        plans = DraftPlans(
            drafts=taken.drafts,
            num_model_nodes=found.num_model,
            model_sizes=found.model_size,
            model_steps=np.full(len(rids), found.num_steps, np.int32),
            predicted=proposed.prediction.accepted_lens,
            chain_lens=taken.chain_lens,
            chain_predicted=taken.chain_predicted,
            model_predicted=found.model_predicted,
            host_sources=taken.source_sets,
            drafter=SOURCES.bit_of("model"),
        )
        self._plans |= {rid: (plans, row) for row, rid in enumerate(rids)}
        return plans

    def plan_launched(self, rids: Sequence[str]) -> bool:
        proposed = self._propose(rids)
        plans = DraftPlans.plain(len(rids))
        self._plans |= {rid: (plans, row) for row, rid in enumerate(rids)}
        return self.allocator.wants_drafts(
            self._slots(rids),
            self._predicted(proposed, len(rids)),
            self._limits(rids, proposed),
            num_context=sum(self._num_tokens[rid] for rid in rids),
        )

    def _propose(self, rids: Sequence[str]) -> Proposed:
        num, slots, asked = len(rids), self._slots(rids), self._asked(rids)
        limit = min(self._longest, self.allocator.widest(num) - 1)
        chains, features = self._chains(rids, limit)
        branches = DraftBatch.of_size(num, self._longest)
        if self._by_votes:
            limit = min(max(self._num_branch_nodes // num, 8), limit)
            limits = np.full(num, limit, np.int32) if asked is None else max_branches(asked, limit)
            self.cache.propose_into(branches, rids, limits, is_tree=True)
        prediction = self._predict(slots, chains, features)
        acceptance = self._acceptance(prediction, chains)
        of_model = self.of_model.predict_sizes(slots, chains, acceptance)
        trees = HostTrees(num, self._longest)
        trees.join(chains, acceptance, branches)
        return Proposed(chains, prediction, trees, of_model)

    def _acceptance(self, prediction: Prediction, chains: DraftBatch) -> Float32:
        """The prediction's, or the votes' of origins in fallback."""
        acceptance, num = prediction.acceptance, len(chains.num_nodes)
        assert acceptance is not None
        in_fallback = fallbacks(self.source, chains, num)
        if in_fallback is None:
            return acceptance
        longest = min(chains.probs.shape[1], MAX_DRAFT_LEN)
        is_in_draft = np.arange(longest) < chains.num_nodes[:, None]
        of_votes = np.where(is_in_draft, chains.probs[:, :longest], 0)
        is_off = np.array(in_fallback)
        acceptance = acceptance.copy()
        acceptance[is_off, :longest] = of_votes[is_off]
        return acceptance

    def _predicted(self, proposed: Proposed, num: int) -> PredictedDrafts:
        trees, of_model = proposed.trees, proposed.of_model
        return PredictedDrafts(
            trees.probs[:num],
            trees.depths[:num],
            trees.num_nodes[:num],
            of_model.of_all,
            of_model.if_cache_right,
        )

    def _limits(self, rids: Sequence[str], proposed: Proposed) -> RowLimits | None:
        asked = self._asked(rids)
        if asked is None:
            return None
        whole, room = self.allocator.drafters[0].sizes[-1], self.allocator.widest(len(rids)) - 1
        num_model = np.minimum(asked.max_tokens, whole * asked.take_model).astype(np.int32)
        left = np.minimum(asked.max_tokens, room) - num_model
        num_host = np.minimum(proposed.trees.num_nodes, left) * asked.take_cache
        return RowLimits(asked.are_fixed, num_host, num_model, asked.max_tokens)
