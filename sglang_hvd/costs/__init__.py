"""What a decode step costs: a table, how it is timed, and how served steps correct it."""

from sglang_hvd.costs.learned import LearnedCosts
from sglang_hvd.costs.profile import costs_of_times
from sglang_hvd.costs.table import StepCosts

__all__ = ["LearnedCosts", "StepCosts", "costs_of_times"]
