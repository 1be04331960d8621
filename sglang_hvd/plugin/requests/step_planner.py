"""Plans the steps that wait for the tokens of the step before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_hvd.allocation import VerifyWidths
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.plugin.requests.held_requests import HeldRequests
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

    def plan(
        self, reqs: Sequence[Req], cached_lens: Sequence[int] | None, *, next_waits: bool
    ) -> StepPlan:
        """The plan of the next step. The tokens of all steps before it are committed.

        cached_lens: see HeldRequests.of_step.
        next_waits: the step after it cannot run ahead, whatever is decided.
        """
        held = self._held.of_step(reqs, cached_lens)
        explains: list[int] = []
        penalised: list[int] = []
        if self._held.has_penalised:
            penalised = [row for row, h in enumerate(held) if h.kind.penalties is not None]
        if self._held.has_reporting:
            explains = [row for row, h in enumerate(held) if h.cycles is not None]
        # Propose cache drafts, predict what is accepted of both drafts, and allocate.
        drafts = self._drafter.plan(
            [request.key for request in held], next_waits=next_waits, explains=explains
        )
        width = self._widths.narrowest(1 + int(drafts.num_nodes.max()))
        return StepPlan(
            held,
            drafts,
            cached_lens=[request.num_tokens - 1 for request in held],
            width=width,
            num_plain=self._launched.num_plain_with(width),
            penalised_rows=penalised,
        )
