"""A decode step in Python, with one call of each part: the oracle of StepCore."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import HostTrees, PredictedDrafts, RowLimits, StepAllocator
from sglang_hvd.config import PAPER_THRESHOLD, HvdConfig
from sglang_hvd.drafter.request import BatchLimits, DraftedRequest, limits_of
from sglang_hvd.payoff import (
    AcceptancePredictor,
    DraftFeatures,
    ModelAcceptance,
    ModelPredictor,
    OnlineCalibration,
    Prediction,
    RequestTracker,
    TokenClasses,
    VerifiedModelDrafts,
)
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import SOURCES, DraftBatch, DraftLimits, DraftPlans, VerifyOutcomes

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Proposed:
    """chains: cache drafts. prediction: for them. trees, of_model: what the allocator weighs."""

    chains: DraftBatch
    prediction: Prediction
    trees: HostTrees
    of_model: ModelAcceptance


class OracleDrafter:
    """Policy allocate in cache mode votes, step by step. num_branch_nodes: of a whole batch."""

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
        self.cache = SuffixCache.of_config(config, background=False)
        self.tracker = RequestTracker(config.history_window, classes)
        self.predictor, self.allocator = predictor, allocator
        threshold = PAPER_THRESHOLD if config.threshold is None else config.threshold
        self.calibration = OnlineCalibration(threshold)
        self.model = ModelPredictor(num_steps, allocator.drafters[0].sizes)
        self._longest, self._num_branch_nodes = longest, num_branch_nodes
        self._requests: dict[str, DraftedRequest] = {}
        self._num_tokens: dict[str, int] = {}
        self._plans: dict[str, tuple[DraftPlans, int]] = {}

    def start(
        self, rid: str, prompt: Sequence[int], *, limits: DraftLimits | None, learns: bool
    ) -> None:
        self.cache.start(rid, prompt)
        teaches = learns and limits is None
        slot = self.tracker.start(np.array(prompt, np.int32), teaches=teaches)
        self.model.start(slot)
        self.allocator.start(slot)
        self._requests[rid] = DraftedRequest(self.cache.slot_of(rid), slot, limits, teaches)
        self._num_tokens[rid] = len(prompt)

    def finish(self, rid: str) -> None:
        self.cache.finish(rid, keep=True)
        self.tracker.finish(self._requests.pop(rid).of_rest)

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
        self.allocator.observe(slots, outcomes.lengths)
        for rid, length in zip(rids, outcomes.lengths.tolist(), strict=True):
            self._num_tokens[rid] += length

    def _observe(
        self, slots: Int32, plans: DraftPlans, outcomes: VerifyOutcomes, chain_accepted: Int32
    ) -> None:
        accepted = np.where(
            plans.drafts.num_nodes > 0, outcomes.num_model_accepted, outcomes.num_accepted_drafts
        )
        accepted[plans.num_model_nodes == 0] = -1
        verified = VerifiedModelDrafts(plans.model_sizes, plans.model_steps, plans.model_predicted)
        self.model.observe(slots, outcomes.token_ids, outcomes.lengths, accepted, verified)
        self.calibration.observe(
            slots,
            outcomes.token_ids,
            outcomes.lengths,
            chain_accepted,
            plans.chain_lens,
            plans.chain_predicted,
        )

    def _propose(self, rids: Sequence[str]) -> Proposed:
        num, slots, asked = len(rids), self._slots(rids), self._asked(rids)
        limit = min(self._longest, self.allocator.widest(num) - 1)
        chains, branches = (DraftBatch.of_size(num, self._longest) for _ in range(2))
        limits = np.full(num, limit, np.int32) if asked is None else asked.max_chains(limit)
        self.cache.propose_into(chains, rids, limits, with_evidence=True)
        limit = min(max(self._num_branch_nodes // num, 8), limit)
        limits = np.full(num, limit, np.int32) if asked is None else asked.max_branches(limit)
        self.cache.propose_into(branches, rids, limits, is_tree=True)
        features = DraftFeatures.of_size(num)
        self.tracker.write_features(features, slots, chains, chains)
        prediction = self.calibration.correct(slots, chains, self.predictor.predict(features))
        acceptance = self._acceptance(prediction, chains)
        of_model = self.model.predict_sizes(slots, chains, acceptance)
        trees = HostTrees(num, self._longest)
        trees.join(chains, acceptance, branches)
        return Proposed(chains, prediction, trees, of_model)

    def _acceptance(self, prediction: Prediction, chains: DraftBatch) -> Float32:
        """The prediction's, or the votes' of origins in fallback."""
        acceptance, num = prediction.acceptance, len(chains.num_nodes)
        assert acceptance is not None
        if not self.calibration.has_fallback:
            return acceptance
        longest = min(chains.probs.shape[1], MAX_DRAFT_LEN)
        is_in_draft = np.arange(longest) < chains.num_nodes[:, None]
        of_votes = np.where(is_in_draft, chains.probs[:, :longest], 0)
        is_off = np.array(self.calibration.is_fallback(chains, num))
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

    def _asked(self, rids: Sequence[str]) -> BatchLimits | None:
        return limits_of([self._requests[rid] for rid in rids])

    def _slots(self, rids: Sequence[str]) -> Int32:
        return np.array([self._requests[rid].of_rest for rid in rids], np.int32)
