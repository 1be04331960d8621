"""The time that the engine's steps take in replay, by a table of costs."""

from collections.abc import Sequence

from sglang_hvd.allocation import DraftExtend
from sglang_hvd.costs import StepCosts
from sglang_hvd.replay.core.single_cycles import DraftPlan


class PlanCosts:
    """The time of a step by its plans.

    widths: nodes per request that a step can verify, root included. A step has the narrowest width
        that holds what was planned.
    draft_extend: decides when the model drafter's KV cache is brought up to date.
    """

    def __init__(
        self,
        costs: StepCosts,
        widths: Sequence[int],
        draft_extend: DraftExtend,
    ) -> None:
        self._costs = costs
        self._widths = tuple(widths)
        self._draft_extend = draft_extend

    def ms(
        self,
        plans: Sequence[DraftPlan],
        num_missing: Sequence[int],
        num_plain: int,
        *,
        num_context: int = 0,
        is_ahead: bool = False,
    ) -> float:
        """The time in milliseconds.

        num_missing: tokens of each request that are missing from the model drafter's KV cache.
        num_plain: see DraftExtend.
        num_context: tokens in the KV caches of all requests.
        is_ahead: the step did not wait for the tokens of the step before it.
        """
        num, width = len(plans), self._width(plans)
        ms = 0.0 if is_ahead else self.wait_ms(num)
        num_model_nodes = [plan.num_model_nodes for plan in plans]
        catching_up = self._draft_extend.catching_up(num_model_nodes, num_missing, num_plain)
        if catching_up:
            mean = round(sum(num_missing[row] for row in catching_up) / len(catching_up))
            ms += self.catch_up_ms(len(catching_up), mean)
        drafting = [plan.num_model_steps for plan in plans if plan.num_model_nodes]
        if drafting:
            ms += self.draft_ms(len(drafting), max(drafting))
        ms += self.verify_ms(num, width, num_context)
        if self._draft_extend.follows(num_plain):
            ms += self.draft_extend_ms(num, width)
        return ms

    def wait_ms(self, num_requests: int) -> float:
        """Time before a step that waits for the tokens of the last."""
        return self._costs.wait_ms(num_requests)

    def catch_up_ms(self, num_requests: int, num_tokens: int) -> float:
        """Time of a draft-extend of so many requests over so many tokens of each."""
        return float(self._costs.catch_up_ms([num_requests], num_tokens)[0])

    def draft_ms(self, num_requests: int, num_steps: int) -> float:
        """Time of a draft of the model drafter."""
        return float(self._costs.draft_ms([num_requests], num_steps)[0])

    def verify_ms(self, num_requests: int, width: int, num_context: int) -> float:
        """Time of a verification."""
        ms = self._costs.verify_ms(num_requests, [width])[0] + self._costs.context_ms(num_context)
        return float(ms)

    def draft_extend_ms(self, num_requests: int, width: int) -> float:
        """Time of a draft-extend after a verification."""
        return float(self._costs.draft_extend_ms(num_requests, [width])[0])

    def num_plain(self, plans: Sequence[DraftPlan], before: int) -> int:
        """num_plain of a step with these plans; `before` is that of the step before it. See
        DraftExtend."""
        return before + 1 if self._width(plans) == 1 else 0

    def ends_run(self, num_missing: Sequence[int]) -> bool:
        """Whether the next step has to wait for the tokens of this one; see DraftExtend."""
        return self._draft_extend.ends_run(max(num_missing), len(num_missing))

    def missing_after(
        self,
        plans: Sequence[DraftPlan],
        num_missing: Sequence[int],
        num_tokens: Sequence[int],
        num_plain: int,
    ) -> list[int]:
        """Tokens of each request that are missing from the model drafter's KV cache after a step.

        num_missing: missing before the step. num_tokens: committed in the step.
        num_plain: see DraftExtend.
        """
        num_model_nodes = [plan.num_model_nodes for plan in plans]
        return self._draft_extend.missing_after(num_model_nodes, num_missing, num_tokens, num_plain)

    def _width(self, plans: Sequence[DraftPlan]) -> int:
        used = 1 + max(plan.num_nodes for plan in plans)
        return next(width for width in self._widths if width >= used)
