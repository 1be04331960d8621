"""The policy's decision: which drafts each request verifies, by costs or by a rule."""

import numpy as np

from sglang_hvd._native import BatchCosts, Rule, StepCore
from sglang_hvd.allocation import StepAllocator
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter.proposer import Proposals
from sglang_hvd.drafter.request import DraftedBatch
from sglang_hvd.types import DraftPlans, HostDrafts, SourceTable


class Planner:
    """Decides for every policy. docs/experiments/allocation.md derives the rule of policy allocate;
    native/rule.hpp has those of the others.

    core: decides.
    allocator: its costs; None under policies by rule.
    table: the draft sources; those on the device are the allocator's drafters, in the same order.
    """

    def __init__(self, core: StepCore, allocator: StepAllocator | None, table: SourceTable) -> None:
        self._core, self._allocator, self._table = core, allocator, table

    def choose(self, batch: DraftedBatch, proposals: Proposals, *, next_waits: bool) -> DraftPlans:
        """The proposals are the latest, of the same batch. Their cycles begin in the core.
        next_waits: see StepAllocator.allocate."""
        num = len(batch)
        ints, floats = np.empty((4, num), np.int32), np.empty((2, num), np.float32)
        flags = np.empty((2, num), np.uint8)
        nodes = np.empty((2, num, proposals.drafts.token_ids.shape[1]), np.int32)
        costs, context = self._costs(num)
        drafter, num_steps, max_host = self._core.choose(
            batch.of_cache,
            batch.of_rest,
            batch.limits,
            costs,
            context,
            next_waits,
            ints,
            floats,
            flags,
            nodes,
        )
        num_host, num_model, model_sizes, chain_lens = ints
        drafts = HostDrafts(
            token_ids=nodes[0, :, :max_host],
            parents=nodes[1, :, :max_host],
            num_nodes=num_host,
            are_trees=flags[0].view(np.bool_),
            matches=proposals.drafts.matches[:num].copy(),
        )
        predicted = proposals.predicted
        return DraftPlans(
            drafts=drafts,
            num_model_nodes=num_model,
            model_sizes=model_sizes,
            model_steps=np.full(num, num_steps, np.int32),
            predicted=None if predicted is None else predicted.prediction.accepted_lens.copy(),
            chain_lens=chain_lens,
            chain_predicted=floats[1],
            model_predicted=floats[0],
            host_sources=flags[1],
            drafter=drafter,
            table=self._table,
        )

    def wants_drafts(self, batch: DraftedBatch) -> bool:
        """Whether drafts would have been better in a step that was launched without any. Its cycles
        begin in the core. The latest proposals are of the same batch. Policy allocate only."""
        costs, context = self._costs(len(batch))
        assert costs is not None, "only allocate decides by costs"
        return self._core.wants_drafts(batch.of_cache, batch.of_rest, batch.limits, costs, context)

    def _costs(self, num_requests: int) -> tuple[BatchCosts | None, float]:
        """The costs of a batch, and milliseconds for 1,000 tokens in the KV caches."""
        if self._allocator is None:
            return None, 0.0
        return self._allocator.costs_of(num_requests), self._allocator.costs.context or 0.0


def rule_of(
    config: HvdConfig, *, drafter: int, room: int, num_model_steps: int, num_model_nodes: int
) -> Rule | None:
    """The rule of a policy; None for policy allocate.

    drafter: bit of the model drafter.
    room: nodes of a verification, root not included.
    num_model_steps, num_model_nodes: steps and nodes of the model drafter's draft, root not
        included.
    """
    if config.policy == "allocate":
        return None
    min_score = config.frequency_threshold
    return Rule(
        policy=config.policy,
        threshold=config.threshold,
        min_score=num_model_steps if min_score is None else min_score,
        has_model=config.drafts_with_model,
        drafter=drafter,
        room=room,
        num_steps=num_model_steps,
        num_nodes=num_model_nodes,
    )
