"""Which draft each request verifies, and how much of it."""

from sglang_hvd.allocation.allocator import Allocation, PredictedDrafts, StepAllocator
from sglang_hvd.allocation.cache_trees import CacheTrees, TakenDrafts
from sglang_hvd.allocation.cost_fit import CostFit, costs_of
from sglang_hvd.allocation.cost_scale import CostScale
from sglang_hvd.allocation.costs import StepCosts
from sglang_hvd.allocation.draft_extend import MAX_POSTPONED_TOKENS, DraftExtend
from sglang_hvd.allocation.model_drafts import (
    DrafterChoices,
    draft_step_choices,
    max_tree_nodes,
    model_tree_sizes,
)
from sglang_hvd.allocation.timed_costs import BatchTimes, costs_of_times, shortest_times
from sglang_hvd.allocation.widths import (
    MAX_WIDE_REQUESTS,
    VerifyWidths,
    powers_of_two_below,
    widths_that_save,
)

__all__ = [
    "MAX_POSTPONED_TOKENS",
    "MAX_WIDE_REQUESTS",
    "Allocation",
    "BatchTimes",
    "CacheTrees",
    "CostFit",
    "CostScale",
    "DraftExtend",
    "DrafterChoices",
    "PredictedDrafts",
    "StepAllocator",
    "StepCosts",
    "TakenDrafts",
    "VerifyWidths",
    "costs_of",
    "costs_of_times",
    "draft_step_choices",
    "max_tree_nodes",
    "model_tree_sizes",
    "powers_of_two_below",
    "shortest_times",
    "widths_that_save",
]
