"""Plain steps that are launched before the tokens of the step before them are known.

A step with drafts waits for the tokens of the last step, and the GPU has nothing to do while the
host reads them and plans. Where no draft pays, this wait is all that distinguishes a step from
plain serving, which launches each step while the last one runs.

So does this plugin after a plain step: each of its requests then has exactly one token more. If the
tokens before that one do not ask for drafts, the next step has none either, whatever that token is.
Its cycles are planned later, when the tokens are known (LaunchedSteps.plan_late), and that says
whether drafts would have been worth a wait.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.plugin.engine.catch_up import CatchUp
from sglang_hvd.plugin.requests.held_requests import HeldRequests
from sglang_hvd.plugin.requests.launched_steps import LaunchedSteps
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.types import DraftPlans

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

_committed_len_of = attrgetter("kv.kv_committed_len")


class RunAhead:
    """Decides whether the next step runs ahead. Never waits for the last step.

    Which servers have one is decided at their start (startup/verify_widths.py, check_run_ahead).
    """

    def __init__(
        self,
        drafter: HybridDrafter,
        held: HeldRequests,
        launched: LaunchedSteps,
        catch_up: CatchUp,
    ) -> None:
        self._drafter, self._held = drafter, held
        self._launched, self._catch_up = launched, catch_up

    def step_plan(self, batch: ScheduleBatch, *, gives_lengths: bool) -> StepPlan | None:
        """The plan of the step that SGLang is about to launch; None if that step has to be planned
        from the tokens of the last one.

        gives_lengths: see StepPlan.
        """
        if (
            not batch.forward_mode.is_decode()
            or batch.has_grammar  # a grammar's mask needs the last tokens
            or self._catch_up.ends_run(len(batch.reqs))
        ):
            return None
        last = self._launched.last
        if last is None or not last.is_plain:
            return None
        self._launched.commit(but=last)
        held = self._held.of_run(batch.reqs)
        self._launched.plan_late(last)
        if held is None or self._launched.wants_drafts:
            return None
        is_coming = last.commits(held)
        if last.plan is None and is_coming.all():
            return None  # the last step was the prefill of all of them: nothing to continue
        # A request's newest token is not cached. The token that is on its way is not counted yet.
        cached_lens = self._drafter.lengths(held.keys) - ~is_coming
        # kv_committed_len lacks a last verification, whose result SGLang has not read yet. The
        # device lays out the step by these lengths. A request with a wrong one is indexed again in
        # HeldRequests.of_step.
        committed = np.fromiter(map(_committed_len_of, batch.reqs), np.int64, len(held))
        if (cached_lens != committed + (is_coming & (last.plan is not None))).any():
            return None
        return StepPlan(
            held,
            DraftPlans.plain(len(held)),
            cached_lens,
            width=1,
            num_plain=self._launched.num_plain_with(width=1),
            runs_ahead=True,
            gives_lengths=gives_lengths,
        )
