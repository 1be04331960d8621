"""What the engine's steps cost in replay."""

from collections.abc import Sequence

from sglang_hvd.allocation import StepCosts, catches_up
from sglang_hvd.types import DraftPlan


class PlanCosts:
    """The time of a step by its plans.

    widths: nodes per request that a step can verify, root included. A step takes the narrowest that
        holds what was planned.
    drafts_with_model: whether the model drafter's KV cache is kept up to date.
    postpones_extend: it is brought up to date for a request when it drafts next, not in every step
        for all requests.
    """

    def __init__(
        self,
        costs: StepCosts,
        widths: Sequence[int],
        drafts_with_model: bool,
        postpones_extend: bool = False,
    ) -> None:
        self._costs = costs
        self._widths = tuple(widths)
        self._drafts_with_model = drafts_with_model
        self._postpones_extend = postpones_extend

    def ms(
        self, plans: Sequence[DraftPlan], num_missing: Sequence[int], *, is_ahead: bool = False
    ) -> float:
        """The time in milliseconds.

        num_missing: tokens of each request that the model drafter's KV cache lacks.
        is_ahead: it did not wait for the tokens of the last step.
        """
        used = 1 + max(plan.num_nodes for plan in plans)
        width = next(width for width in self._widths if width >= used)
        ms = self._costs.verify_ms(len(plans), [width])[0]
        if not is_ahead:
            ms += self._costs.wait_ms(len(plans))
        drafting = [plan.num_model_steps for plan in plans if plan.num_model_nodes]
        if drafting:
            ms += self._costs.draft_ms([len(drafting)], max(drafting))[0]
        if not self._drafts_with_model:
            return float(ms)
        if not self._postpones_extend:
            return float(ms + self._costs.draft_extend_ms(len(plans), [width])[0])
        pairs = zip(plans, num_missing, strict=True)
        caught_up = [
            missing for plan, missing in pairs if catches_up(plan.num_model_nodes, missing)
        ]
        if caught_up:
            mean = round(sum(caught_up) / len(caught_up))
            ms += self._costs.catch_up_ms([len(caught_up)], mean)[0]
        return float(ms)
