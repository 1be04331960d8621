"""The hybrid drafter: decides cycle by cycle which draft each request verifies."""

from sglang_hvd.drafter.forecasts import AllocationForecast, PayoffForecast
from sglang_hvd.drafter.hybrid_drafter import HybridDrafter
from sglang_hvd.drafter.proposals import Proposals

__all__ = ["AllocationForecast", "HybridDrafter", "PayoffForecast", "Proposals"]
