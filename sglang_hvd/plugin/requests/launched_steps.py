"""The steps whose tokens are still on their way to the host, and how they are committed.

Tokens reach the drafter from the worker's own results. Under overlap scheduling `req.output_ids`
lacks the tokens of the last launched step.

All methods run on the scheduler's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.drafter.cycle_reports import cycle_of
from sglang_hvd.plugin.device.host_transfer import HostCopy
from sglang_hvd.plugin.requests.held_requests import HeldBatch, HeldRequest, HeldRequests
from sglang_hvd.plugin.requests.served_figures import ServedFigures
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.step_clock import Phase, StepClock
from sglang_hvd.types import VerifyOutcomes

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step whose tokens are on their way to the host.

    held: the request of each row, None for a row that commits nothing.
    plan: None for a prefill, which commits one token of each request.
    is_plain: of a verification, whether it verifies one node for each request, so that each commits
        exactly one token. Of a prefill, whether the last verification before it was plain.
    num_forgotten: HeldRequests.num_forgotten when it was launched.
    began_at: when it began, in seconds; None for a prefill.
    """

    held: Sequence[HeldRequest | None]
    copy: HostCopy
    plan: StepPlan | None
    is_plain: bool
    num_forgotten: int
    began_at: float | None = None

    def commits(self, batch: HeldBatch) -> npt.NDArray[np.bool_]:
        """Whether it commits tokens of each of these requests: bool[num_requests]."""
        if self.plan is not None and self.plan.held is batch:
            return np.ones(len(batch), np.bool_)
        keys = {held.key for held in self.held if held is not None}
        return np.fromiter(map(keys.__contains__, batch.keys), np.bool_, len(batch))


class LaunchedSteps:
    """Commits the tokens of each step once they are on the host. Holds the latest step, and the one
    before it if the latest ran ahead of its tokens.

    stream: copies tokens to the host; None where the device is the host.
    begins_gaps: the clock's gap begins with the tokens of the last step, when the host has them.
        Where the device is the host, it begins when that step returns.
    """

    def __init__(
        self,
        drafter: HybridDrafter,
        held: HeldRequests,
        figures: ServedFigures,
        *,
        stream: torch.cuda.Stream | None,
        clock: StepClock,
        begins_gaps: bool,
    ) -> None:
        self._drafter, self._held, self._figures = drafter, held, figures
        self._stream, self._clock, self._begins_gaps = stream, clock, begins_gaps
        self._steps: deque[LaunchedStep] = deque()
        self._unplanned: LaunchedStep | None = None
        self._num_plain = 0
        self._wants_drafts = False
        self._committed_at = 0.0

    @property
    def last(self) -> LaunchedStep | None:
        """The latest step, None if its tokens are committed."""
        return self._steps[-1] if self._steps else None

    @property
    def wants_drafts(self) -> bool:
        """Whether drafts would have been worth a wait in a step that ran ahead since the last
        planned step. If so, the next step should be planned."""
        return self._wants_drafts

    def num_plain_with(self, width: int) -> int:
        """StepPlan.num_plain of the next step, if it is this wide."""
        return self._num_plain + 1 if width == 1 else 0

    def record_prefill(
        self, reqs: Sequence[Req], chunked_req: Req | None, next_token_ids: torch.Tensor
    ) -> None:
        """Records a prefill: its requests are held from now on, and each commits one token.

        Args:
            next_token_ids: int[num_requests] on the device. The entry of `chunked_req`, whose
                prompt goes on in the next prefill, is no token of the output.
        """
        self.commit()
        self._clock.end_step()  # the prefill is launched: the device does not wait for the host
        held = self._held.of_prefill(reqs)
        step = LaunchedStep(
            held=[None if req is chunked_req else h for req, h in zip(reqs, held, strict=True)],
            copy=HostCopy([next_token_ids], self._stream),
            plan=None,
            is_plain=self._num_plain > 0,
            num_forgotten=self._held.num_forgotten,
        )
        self._steps.append(step)

    def record_verify(
        self,
        plan: StepPlan,
        next_token_ids: torch.Tensor,
        accept_lens: torch.Tensor,
        num_model_accepted: torch.Tensor | None,
    ) -> None:
        """Records a verification. Its tokens start their way to the host.

        Args:
            next_token_ids: int[num_requests * width] on the device, each request's committed
                tokens at the front of its row.
            accept_lens: int[num_requests]; committed tokens, bonus included.
            num_model_accepted: int[num_requests]; tokens of the model drafter's drafts that were
                right, None if it did not draft.
        """
        arrays = [next_token_ids, accept_lens]
        if num_model_accepted is not None:
            arrays.append(num_model_accepted)
        with self._clock.measure(Phase.TRANSFER):
            copy = HostCopy(arrays, self._stream)
        step = LaunchedStep(
            held=plan.held.requests,
            copy=copy,
            plan=plan,
            is_plain=plan.width == 1,
            num_forgotten=self._held.num_forgotten,
            began_at=self._clock.began_at,
        )
        self._steps.append(step)
        self._num_plain = plan.num_plain
        if plan.runs_ahead:
            assert self._unplanned is None, "the step before one that runs ahead is planned"
            self._figures.num_steps_ahead += 1
            self._unplanned = step
        else:
            self._wants_drafts = False

    def commit(self, *, but: LaunchedStep | None = None) -> None:
        """Commits the tokens of the launched steps, the oldest first, and stops before the step
        `but`. Waits for the copies of the steps that it commits."""
        while self._steps and self._steps[0] is not but:
            self._commit_first()

    def plan_late(self, step: LaunchedStep) -> None:
        """Plans the cycles of a step that ran ahead, now that all steps before it are committed.
        Does nothing for other steps."""
        if self._unplanned is not step:
            return
        self._unplanned = None
        assert step.plan is not None, "a prefill is not planned"
        keys = step.plan.held.keys
        if (rows := self._rows_held(step)) is not None:
            keys = [keys[row] for row in rows]
        if keys and self._drafter.plan_launched(keys):
            self._wants_drafts = True

    def note_finished(self, rid: str) -> None:
        """A request ended while running: its output goes to the shared cache."""
        for held in self._held.of_rid(rid):
            req = held.req()
            if req is not None and req.finished():
                self._finish(req, held)

    def note_finished_at_prefill(self, req: Req) -> None:
        """A request ended with a prefill. If it had come back with output from a retraction, its
        output is kept as that of a request that ended while running."""
        held = self._held.find(req)
        if held is not None and len(req.output_ids) > 1:
            self._finish(req, held)

    def _finish(self, req: Req, held: HeldRequest) -> None:
        num_tokens = len(req.origin_input_ids) + len(req.output_ids)
        while self._steps and self._drafter.num_tokens(held.key) < num_tokens:
            self._commit_first()  # without overlap, or after a step that ran ahead
        self._held.finish(req, held)

    def _commit_first(self) -> None:
        step = self._steps.popleft()
        self.plan_late(step)
        token_ids, *of_requests = step.copy.wait()
        if self._begins_gaps and not self._steps:  # otherwise the device works on the next step
            self._clock.know_tokens()
        ms = self._ms_of(step) if self._held.has_reporting else None
        with self._clock.measure(Phase.COMMIT):
            rows = self._rows_held(step)
            if step.plan is not None:
                self._commit_cycles(step.plan, ms, rows, token_ids, *of_requests)
            elif rows:
                self._commit_prefill(step, rows, token_ids)

    def _rows_held(self, step: LaunchedStep) -> list[int] | None:
        """The rows whose requests are still held. None stands for all: no request was forgotten
        since the verification was launched."""
        if step.plan is not None and step.num_forgotten == self._held.num_forgotten:
            return None
        return [row for row, h in enumerate(step.held) if h is not None and h in self._held]

    def _ms_of(self, step: LaunchedStep) -> float | None:
        """The time of a step whose tokens have just arrived, see Cycle.ms."""
        now, before = self._clock.now(), self._committed_at
        self._committed_at = now
        return None if step.began_at is None else 1e3 * (now - max(before, step.began_at))

    def _commit_prefill(self, step: LaunchedStep, rows: list[int], token_ids: np.ndarray) -> None:
        tokens = self._held.as_sampled(token_ids[rows].reshape(-1, 1))
        for row, committed in zip(rows, tokens, strict=True):
            held = step.held[row]
            assert held is not None, "rows without a request are left out"
            if held.output_ids is not None:
                held.output_ids.extend(committed.tolist())
            self._drafter.extend(held.key, committed)

    def _commit_cycles(
        self,
        plan: StepPlan,
        ms: float | None,
        rows: list[int] | None,
        token_ids: np.ndarray,
        lengths: np.ndarray,
        num_model_accepted: np.ndarray | None = None,
    ) -> None:
        """rows: of the requests that are still held; None: all."""
        held, lengths = plan.held, lengths.astype(np.int32, copy=False)
        if num_model_accepted is None:
            num_model_accepted = np.full(len(held), -1, np.int32)
        outcomes = VerifyOutcomes(
            self._held.as_sampled(token_ids.reshape(-1, plan.width)),
            lengths,
            lengths - 1,
            num_model_accepted.astype(np.int32, copy=False),
        )
        if len(held.reporting_rows):
            self._report(plan, ms, outcomes)
        for row in held.output_rows:
            output_ids = held.requests[row].output_ids
            assert output_ids is not None, "these rows keep their output"
            output_ids.extend(outcomes.token_ids[row, : lengths[row]].tolist())
        if rows is None:
            self._drafter.commit(held.keys, outcomes)
        elif rows:
            self._drafter.commit([held.keys[row] for row in rows], outcomes.select(rows))

    def _report(self, plan: StepPlan, ms: float | None, outcomes: VerifyOutcomes) -> None:
        """Keeps the cycles of the requests that report them, before these are committed."""
        sources = plan.drafts.sources
        for row in plan.held.reporting_rows:
            h = plan.held.requests[row]
            if h not in self._held:
                continue
            assert h.cycles is not None, "these rows report their cycles"
            cycle = cycle_of(
                plan.drafts,
                row,
                outcomes.token_ids[row, : outcomes.lengths[row]].tolist(),
                int(outcomes.num_model_accepted[row]),
                source=sources[row],
                at=self._drafter.num_tokens(h.key) - h.num_prompt_tokens,
                width=plan.width,
                num_requests=len(plan.held),
                ms=ms,
                ran_ahead=plan.runs_ahead,
                tells_shared=self._held.report_cycles,
            )
            h.cycles.append(cycle.report())
