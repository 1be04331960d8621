"""The hybrid drafter: decides cycle by cycle which drafts each request verifies."""

from sglang_hvd.drafter.hybrid_drafter import HybridDrafter
from sglang_hvd.drafter.proposer import ChainPrediction, Proposals, TreePrediction

__all__ = ["ChainPrediction", "HybridDrafter", "Proposals", "TreePrediction"]
