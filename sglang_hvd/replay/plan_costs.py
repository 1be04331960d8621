"""What the engine's steps cost in replay."""

from collections.abc import Sequence

from sglang_hvd.allocation import StepCosts
from sglang_hvd.types import DraftPlan


class PlanCosts:
    """The time of a step by its plans.

    widths: nodes per request that a step can verify, root included. A step takes the narrowest that
        holds what was planned.
    drafts_with_model: whether the model drafter's KV cache is kept up to date, in every step.
    """

    def __init__(self, costs: StepCosts, widths: Sequence[int], drafts_with_model: bool) -> None:
        self._costs = costs
        self._widths = tuple(widths)
        self._drafts_with_model = drafts_with_model

    def ms(self, plans: Sequence[DraftPlan]) -> float:
        """In milliseconds."""
        used = 1 + max(plan.num_nodes for plan in plans)
        width = next(width for width in self._widths if width >= used)
        ms = self._costs.verify_ms(len(plans), [width])[0]
        if self._drafts_with_model:
            ms += self._costs.draft_extend_ms(len(plans), [width])[0]
        drafting = [plan.num_model_steps for plan in plans if plan.num_model_nodes]
        if drafting:
            ms += self._costs.draft_ms([len(drafting)], max(drafting))[0]
        return float(ms)
