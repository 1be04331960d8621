"""Which draft each request verifies, and how much of it."""

from sglang_hvd.allocation.allocator import Allocation, PredictedDrafts, RowLimits, StepAllocator
from sglang_hvd.allocation.draft_extend import MAX_POSTPONED_TOKENS, DraftExtend
from sglang_hvd.allocation.host_trees import HostTrees, TakenDrafts
from sglang_hvd.allocation.model_drafts import (
    DrafterChoices,
    draft_step_choices,
    max_tree_nodes,
    model_tree_sizes,
)
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
    "DraftExtend",
    "DrafterChoices",
    "HostTrees",
    "PredictedDrafts",
    "RowLimits",
    "StepAllocator",
    "TakenDrafts",
    "VerifyWidths",
    "draft_step_choices",
    "max_tree_nodes",
    "model_tree_sizes",
    "powers_of_two_below",
    "widths_that_save",
]
