"""What a decode step costs: a table, and how it is timed."""

from sglang_hvd.costs.profile import BatchTimes, costs_of_times, shortest_times
from sglang_hvd.costs.table import StepCosts

__all__ = ["BatchTimes", "StepCosts", "costs_of_times", "shortest_times"]
