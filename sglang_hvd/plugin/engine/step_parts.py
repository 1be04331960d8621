"""Builds parts of a worker from the settings, and from the states that the server really has."""

from __future__ import annotations

import logging

from sglang.srt.runtime_context import get_observability, get_parallel

from sglang_hvd.allocation import (
    DrafterChoices,
    DraftExtend,
    StepAllocator,
    max_tree_nodes,
    model_tree_sizes,
)
from sglang_hvd.costs import StepCosts
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.engine.draft_worker import HvdDraftWorker
from sglang_hvd.plugin.engine.kept_costs import profiled_costs
from sglang_hvd.plugin.engine.states.step_states import StepStates
from sglang_hvd.plugin.requests.recording import RequestRecorder
from sglang_hvd.plugin.startup.launch import HvdLaunch
from sglang_hvd.user_cache import costs_folder

logger = logging.getLogger(__name__)


def build_allocator(
    launch: HvdLaunch,
    draft_worker: HvdDraftWorker,
    states: StepStates,
    *,
    verifies_trees: bool,
    draft_extend: DraftExtend,
    has_mrope: bool,
    ranks: RankGroup,
) -> StepAllocator | None:
    """The allocator of policy allocate; None for the other policies.

    has_mrope: positions need real requests, so that steps cannot be timed before the server serves.
    """
    if launch.config.policy != "allocate":
        return None
    if not verifies_trees:
        logger.info(
            "HVD: drafts do not branch, and each request verifies one draft. Topk 1, this model's "
            "attention or --enable-deterministic-inference asks for chains."
        )
    if launch.config.costs is not None:
        costs = StepCosts.load(launch.config.costs)
    elif launch.config.cost_profile == "skip" or has_mrope:
        costs = StepCosts.assumed(states.widths.values)
    else:
        costs = profiled_costs(
            draft_worker,
            states,
            model_tree_width=launch.model_tree_width,
            draft_extend=draft_extend,
            use_kept=launch.config.cost_profile == "kept",
            folder=costs_folder(),
            max_requests=draft_worker.target_worker.model_runner.max_running_requests,
            ranks=ranks,
        )
    topk, steps = draft_worker.topk, states.of_draft_steps.num_steps
    sizes = model_tree_sizes(launch.num_model_nodes)
    if topk == 1:  # a chain, which is cut by its steps
        sizes = sizes[-1:]
    nodes = tuple(max_tree_nodes(topk, num) for num in steps)
    return StepAllocator(
        costs,
        widths=states.widths.values,
        base_width=states.widths.base,
        drafters=[DrafterChoices(sizes, steps, nodes)],
        merges=verifies_trees,
        draft_extend=draft_extend,
        runs_ahead=launch.config.run_ahead,
    )


def build_recorder(launch: HvdLaunch) -> RequestRecorder | None:
    """The recorder of --hvd-record; None without it."""
    # Every tensor-parallel rank serves the same requests; one of them records.
    if launch.config.record is None or get_parallel().tp_rank != 0:
        return None
    return RequestRecorder(launch.config)


def has_metrics() -> bool:
    """Whether this process counts for the Prometheus metrics."""
    # Every tensor-parallel rank plans the same cycles; one of them counts.
    return get_observability().enable_metrics and get_parallel().tp_rank == 0


def build_ranks() -> RankGroup:
    """The tensor-parallel ranks of this server."""
    parallel = get_parallel()
    return RankGroup(parallel.tp_group.cpu_group if parallel.tp_size > 1 else None)
