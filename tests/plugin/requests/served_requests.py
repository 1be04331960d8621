"""The requests of a server without models, and SGLang's calls for them."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hvd.allocation import DrafterChoices, DraftExtend, StepAllocator, VerifyWidths
from sglang_hvd.config import HvdConfig, Policy
from sglang_hvd.costs import StepCosts
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import TokenClasses
from sglang_hvd.plugin.engine.catch_up import CatchUp
from sglang_hvd.plugin.engine.run_ahead import RunAhead
from sglang_hvd.plugin.engine.worker import HvdWorker
from sglang_hvd.plugin.requests.held_requests import HeldRequests
from sglang_hvd.plugin.requests.launched_steps import LaunchedSteps
from sglang_hvd.plugin.requests.metrics import Metrics
from sglang_hvd.plugin.requests.served_figures import ServedFigures
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.plugin.requests.step_planner import StepPlanner
from sglang_hvd.step_clock import StepClock
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import DraftPlans
from tests.payoff.made_up import constant_survival

VOCAB_SIZE = 100
WIDTHS = (1, 8)

_SLOTS = itertools.count()

COSTS = StepCosts(
    about="made up",
    batch_sizes=(1, 8),
    widths=WIDTHS,
    verify=((5.0, 6.0), (5.0, 6.0)),
    draft_round=(500.0, 500.0),
    draft_extend=((0.0, 0.0), (0.0, 0.0)),
)


class ServedRequests:
    """What serves requests in a worker, without the models.

    allocates: by costs, of which those of the model drafter are too high for it.
    payoff: predicted probability of each node of a cache draft, given the one before, if allocates.
    begins_gaps: see LaunchedSteps.
    now: the time in seconds.
    """

    def __init__(
        self,
        metrics: Metrics | None = None,
        *,
        report_cycles: bool = False,
        allocates: bool = False,
        payoff: float = 0.9,
        begins_gaps: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        policy: Policy = "allocate" if allocates else "cache"
        config = HvdConfig(policy=policy, report_cycles=report_cycles)
        allocator = StepAllocator(COSTS, widths=WIDTHS, drafters=[DrafterChoices((7,), (3,))])
        classes = TokenClasses.from_strings(map(str, range(VOCAB_SIZE)))
        clock = self.clock = StepClock(now)
        self.drafter = HybridDrafter(
            config,
            cache=SuffixCache.of_config(config, background=False),
            predictor=constant_survival(payoff) if allocates else None,
            token_classes=classes if allocates else None,
            num_model_steps=3,
            num_model_nodes=7,
            verify_width=8,
            allocator=allocator if allocates else None,
        )
        self.figures = ServedFigures(self.drafter, clock=clock, recorder=None, metrics=metrics)
        self.held = HeldRequests(
            self.drafter,
            self.figures,
            clock=clock,
            config=config,
            recorder=None,
            vocab_size=VOCAB_SIZE,
        )
        self.launched = LaunchedSteps(
            self.drafter,
            self.held,
            self.figures,
            stream=None,
            clock=clock,
            begins_gaps=begins_gaps,
        )
        widths = VerifyWidths(WIDTHS if allocates else WIDTHS[-1:], WIDTHS[-1])
        self.planner = StepPlanner(self.drafter, self.held, self.launched, widths)
        nothing: Any = None
        self.catch_up = CatchUp(nothing, DraftExtend.NEVER, max_nodes=8, costs=nothing, clock=clock)
        self.run_ahead = RunAhead(self.drafter, self.held, self.launched, self.catch_up)
        self.step: StepPlan | None = None

    def worker(self) -> HvdWorker:
        """A worker that has these and no models."""
        worker = HvdWorker.__new__(HvdWorker)
        worker._drafter, worker._held, worker._launched = self.drafter, self.held, self.launched
        worker._figures, worker._catch_up = self.figures, self.catch_up
        worker._run_ahead, worker._ahead = self.run_ahead, None
        return worker

    def plan(self, reqs: Sequence[Req], cached_lens: Sequence[int]) -> DraftPlans:
        """Plans the next step from the tokens of all steps before it."""
        self.launched.commit()
        self.step = self.planner.plan(reqs, np.array(cached_lens), next_waits=False)
        return self.step.drafts

    def plan_ahead(self, reqs: Sequence[Req], *, has_grammar: bool = False) -> bool:
        """Whether the next step runs ahead of the tokens of the last; it is planned then."""
        mode = SimpleNamespace(is_decode=lambda: True)
        batch: Any = SimpleNamespace(reqs=reqs, has_grammar=has_grammar, forward_mode=mode)
        self.step = self.run_ahead.step_plan(batch, gives_lengths=False)
        return self.step is not None

    def prefill(self, *reqs: Req) -> None:
        """A prefill of these, each of which commits token 3."""
        for req in reqs:  # as SGLang counts, of which each result adds what it committed
            req.kv.kv_committed_len = len(req.origin_input_ids) + len(req.output_ids)
        self.launched.record_prefill(reqs, None, torch.full((len(reqs),), 3))

    def verify(self, token_ids: Sequence[int], num_committed: Sequence[int] | None = None) -> None:
        """The verification of the step that was planned last.

        token_ids: as many of each request, the committed ones first; padded here to the width.
        num_committed: of each request; None: one.
        """
        assert self.step is not None, "a step is planned before it is verified"
        num, width = len(self.step.held), self.step.width
        rows = torch.full((num, width), 99, dtype=torch.int32)
        given = torch.tensor(token_ids).view(num, -1)
        rows[:, : given.shape[1]] = given
        accept_lens = torch.tensor(num_committed or [1] * num, dtype=torch.int32)
        self.launched.record_verify(self.step, rows.view(-1), accept_lens, None)

    def end(self, req: Req, output_ids: list[int]) -> None:
        """The request commits these besides, and ends by its length."""
        req.output_ids.extend(output_ids)
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        self.launched.note_finished(req.rid)

    def describe(self) -> dict[str, Any]:
        """The counters of /server_info."""
        self.held.drop_ended()
        return self.figures.describe(len(self.held))

    def publish(self) -> None:
        """Brings the metrics up to date."""
        self.figures.publish(len(self.held))


def request(rid: str, prompt: list[int], *, extra_key: str | None = None) -> Req:
    """A request of SGLang's that has not been prefilled."""
    sampling = SamplingParams(temperature=0, max_new_tokens=4)
    sampling.normalize(None)
    req = Req(rid, "", array("q", prompt), sampling, extra_key=extra_key)
    req.kv.req_pool_idx = next(_SLOTS)
    return req


def read_results(reqs: list[Req], tokens: list[int], *, is_prefill: bool = False) -> None:
    """SGLang reads the results of a step, once it has launched the next one."""
    for req, token in zip(reqs, tokens, strict=True):
        req.output_ids.append(token)
        req.kv.kv_committed_len += not is_prefill
