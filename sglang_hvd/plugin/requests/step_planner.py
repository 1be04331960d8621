"""Plans the steps that wait for the tokens of the step before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_hvd.allocation import VerifyWidths
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.plugin.requests.held_requests import HeldRequests, Int64
from sglang_hvd.plugin.requests.launched_steps import LaunchedSteps
from sglang_hvd.plugin.requests.step_plan import StepPlan

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class StepPlanner:
    """Decides what each request of a decode step verifies, and how wide the step is.

    widths: those that the server can verify at.
    """

    def __init__(
        self,
        drafter: HybridDrafter,
        held: HeldRequests,
        launched: LaunchedSteps,
        widths: VerifyWidths,
    ) -> None:
        self._drafter, self._held, self._launched = drafter, held, launched
        self._widths = widths

    def plan(self, reqs: Sequence[Req], cached_lens: Int64 | None, *, next_waits: bool) -> StepPlan:
        """The plan of the next step. The tokens of all steps before it are committed.

        cached_lens: see HeldRequests.of_step.
        next_waits: the step after it cannot run ahead, whatever is decided.
        """
        held = self._held.of_step(reqs, cached_lens)
        # Propose cache drafts, predict what is accepted of both drafts, and allocate.
        drafts = self._drafter.plan(held.keys, next_waits=next_waits, explains=held.reporting_rows)
        width = self._widths.narrowest(1 + int(drafts.num_nodes.max()))
        return StepPlan(
            held,
            drafts,
            cached_lens=self._drafter.lengths(held.keys) - 1,
            width=width,
            num_plain=self._launched.num_plain_with(width),
        )
