"""SGLang's EAGLE worker, with a choice of draft for each request and step.

`HvdWorker._decode` is the whole decode step. Everything that it calls is built once, after the
graphs are captured (`init_cuda_graphs`). SGLang calls the other methods when something happens to a
request or to the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.model_executor.forward_batch_info import get_server_return_hidden_states_mode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.spec_utils import spec_stage_span

from sglang_hvd.allocation import draft_step_choices
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.plugin.device.flashinfer_plans import (
    PlanFence,
    plan_drafts_on_host,
    uses_flashinfer,
)
from sglang_hvd.plugin.device.host_transfer import all_to_device, copy_stream
from sglang_hvd.plugin.engine.catch_up import CatchUp, draft_extend_of
from sglang_hvd.plugin.engine.draft_worker import HvdDraftWorker, drafting
from sglang_hvd.plugin.engine.run_ahead import RunAhead
from sglang_hvd.plugin.engine.served_costs import ServedCosts
from sglang_hvd.plugin.engine.served_predictor import ServedPredictor
from sglang_hvd.plugin.engine.states.step_states import StepStates
from sglang_hvd.plugin.engine.step_drafts import StepDrafts
from sglang_hvd.plugin.engine.step_parts import (
    build_allocator,
    build_ranks,
    build_recorder,
    has_metrics,
)
from sglang_hvd.plugin.engine.verifications import (
    Verifications,
    give_last_hidden_states,
    keep_last_hidden_states,
)
from sglang_hvd.plugin.requests.held_requests import HeldRequests, Int64
from sglang_hvd.plugin.requests.launched_steps import LaunchedSteps
from sglang_hvd.plugin.requests.metrics import SERVER_METRICS, Metrics, PredictorMetrics
from sglang_hvd.plugin.requests.served_cache import ServedCache
from sglang_hvd.plugin.requests.served_figures import ServedFigures
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.plugin.requests.step_planner import StepPlanner
from sglang_hvd.plugin.sampling.node_sampler import NodeSampler
from sglang_hvd.plugin.startup.launch import launch_of
from sglang_hvd.plugin.startup.refusals import check_sampling
from sglang_hvd.plugin.startup.supported import require_hooks
from sglang_hvd.plugin.startup.token_strings import forget_tokenizer, token_strings
from sglang_hvd.plugin.startup.verify_widths import check_run_ahead
from sglang_hvd.plugin.trees.verify_input import HvdVerifyInput, num_accepted_of_model
from sglang_hvd.step_clock import Phase, Stage, StepClock
from sglang_hvd.suffix_cache.orders import Order

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

# While steps run, the metrics are at most this old: bringing them up to date takes some 50 us.
_PUBLISH_SECONDS = 0.2


class HvdWorker(eagle_worker_v2.EAGLEWorkerV2):
    """EAGLE worker whose drafts come from the suffix cache or the model drafter, whichever pays."""

    speculative_num_draft_tokens: int
    topk: int

    def __init__(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        require_hooks()
        launch = launch_of(server_args)
        assert launch is not None, "create_worker chose HvdWorker without a launch"
        make = partial(HvdDraftWorker, launch=launch, on_prefill=self._record_prefill)
        with _draft_workers_by(make):
            super().__init__(server_args, *args, **kwargs)
        has_window = bool(self.target_worker.model_runner.sliding_window_size)
        attention = replace(launch.attention, has_window=has_window or launch.attention.has_window)
        attention.check_draft_shapes(self.topk, needs_trees=launch.config.policy == "both")
        self._launch = replace(launch, attention=attention)
        self._ahead: StepPlan | None = None
        self._published_at = 0.0
        self._is_idle = False

    def init_cuda_graphs(self) -> None:
        """SGLang calls this once the pools and the attention backends exist. It captures SGLang's
        graphs, and builds everything that serves the steps."""
        launch, config = self._launch, self._launch.config
        target, draft_worker = self.target_worker.model_runner, self._draft_worker
        if self.device == "cuda":
            max_nodes = launch.widths.max_nodes(target.max_running_requests)
            check_sampling(max_nodes, target.model_config.vocab_size)
        if get_server_return_hidden_states_mode().need_capture():
            keep_last_hidden_states(target.model)
        plan_drafts_on_host()
        super().init_cuda_graphs()

        ranks, clock = build_ranks(), StepClock()
        models = target.model_config, draft_worker.draft_runner.model_config
        has_mrope = any(model.model_is_mrope for model in models)
        draft_extend = draft_extend_of(config, device=self.device, has_mrope=has_mrope)
        num_steps = self.speculative_num_steps
        choices = draft_step_choices(num_steps) if config.policy == "allocate" else (num_steps,)
        states = StepStates.build(self, launch, choices, draft_extend, ranks)
        launch = replace(launch, widths=states.widths)
        check_run_ahead(
            config,
            # server_args holds what the user asked for; the resolved view, what SGLang made of it.
            resolved_view(self.server_args),
            states.widths.values,
            plans_wait=uses_flashinfer() and not states.has_host_plans,
        )
        verifies_trees = launch.attention.may_branch(self.topk)
        allocator = build_allocator(
            launch,
            draft_worker,
            states,
            verifies_trees=verifies_trees,
            draft_extend=draft_extend,
            has_mrope=has_mrope,
            ranks=ranks,
        )
        costs = ServedCosts(
            allocator,
            is_fixed=config.costs is not None,
            runs_ahead=config.run_ahead,
            device=self.device,
            ranks=ranks,
            clock=clock,
        )
        drafter = HybridDrafter.from_config(
            config,
            token_strings=token_strings(),
            num_model_steps=num_steps,
            num_model_nodes=launch.num_model_nodes,
            verify_width=states.widths.widest,
            allocator=allocator,
            verifies_trees=verifies_trees,
            deterministic=ranks.process_group is not None,
            clock=clock,
        )
        predictor_metrics = PredictorMetrics() if has_metrics() else None
        self._served_predictor = ServedPredictor(
            drafter, config, ranks=ranks, metrics=predictor_metrics
        )
        self._served_cache = ServedCache(
            drafter,
            config,
            ranks=ranks,
            group=get_parallel().dp_rank or 0,
            vocab_size=target.model_config.vocab_size,
        )
        self._served_cache.fill()
        recorder = build_recorder(launch)
        forget_tokenizer()
        server_metrics = Metrics(SERVER_METRICS) if has_metrics() else None
        figures = ServedFigures(drafter, clock=clock, recorder=recorder, metrics=server_metrics)
        held = HeldRequests(
            drafter,
            figures,
            clock=clock,
            config=config,
            recorder=recorder,
            vocab_size=target.model_config.vocab_size,
        )
        stream = copy_stream(self.device)
        launched = LaunchedSteps(
            drafter, held, figures, stream=stream, clock=clock, begins_gaps=stream is not None
        )
        catch_up = CatchUp(
            draft_worker,
            draft_extend,
            max_nodes=states.widths.max_nodes(target.max_running_requests),
            costs=costs,
            clock=clock,
        )

        self._launch, self._states, self._verifies_trees = launch, states, verifies_trees
        self._drafter, self._costs, self._clock = drafter, costs, clock
        self._figures, self._held, self._launched = figures, held, launched
        self._draft_extend, self._catch_up = draft_extend, catch_up
        self._planner = StepPlanner(drafter, held, launched, states.widths)
        self._step_drafts = StepDrafts(draft_worker, states, costs=costs, clock=clock)
        self._run_ahead = RunAhead(drafter, held, launched, catch_up) if config.run_ahead else None
        self._verifications = Verifications(self, costs, clock)
        self._node_sampler = NodeSampler(target)
        self._extend_fence = PlanFence.of(self.device)

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """One step of SGLang's scheduler: a prefill, or one decoding cycle of every request."""
        self._is_idle = False
        ahead, self._ahead = self._ahead, None
        if batch.forward_mode.is_extend():
            self._clock.end_step()
            self._costs.interrupt()
            self._states.use_base_width()
            self._node_sampler.penalise_prefill(batch)
            result = super().forward_batch_generation(
                batch, on_publish, grammar_barrier, pp_proxy_tensors
            )
            give_last_hidden_states(batch, result)
            self._publish()
            self._served_cache.warm(is_idle=False)
            return result
        assert pp_proxy_tensors is None, "pipeline parallelism is refused at start"
        assert not batch.forward_mode.is_idle(), "data-parallel attention is refused at start"
        self._clock.begin_step()
        self._costs.begin_step(len(batch.reqs), is_ahead=ahead is not None)
        result = self._decode(batch, ahead, on_publish, grammar_barrier)
        self._costs.end_step()
        if self.device == "cpu":  # elsewhere they are on their way, see LaunchedSteps
            self._clock.know_tokens()
        # The step is launched: the rest is done while the device works.
        self._publish()
        self._served_cache.warm(is_idle=False)
        return result

    def _decode(
        self,
        batch: ScheduleBatch,
        ahead: StepPlan | None,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Any,
    ) -> GenerationBatchResult:
        """One decode step. It replaces the decode branch of SGLang's forward_batch_generation.

        ahead: the plan of a step that runs ahead; None for a step that is yet to be planned.
        """
        plan = ahead
        if plan is None:
            # Commit the tokens of the last step.
            self._launched.commit()
            # Propose cache drafts, predict what is accepted of both drafts, and allocate.
            plan = self._planner.plan(batch.reqs, _lengths_of(batch), next_waits=batch.has_grammar)
        elif plan.gives_lengths:
            # For this step alone: SGLang restores what the batch had.
            batch.seq_lens_cpu = torch.tensor(plan.cached_lens)
            batch.seq_lens_sum = int(plan.cached_lens.sum())
            assert self.device == "cuda" or torch.equal(batch.seq_lens, batch.seq_lens_cpu)
        # Send in one copy all that the device needs: to catch up, to draft, to lay out, to sample.
        due = self._catch_up.due(plan)
        of_drafts = self._step_drafts.arrays(plan)
        of_sampling = self._node_sampler.arrays(plan, batch)
        with self._clock.measure(Phase.TRANSFER):
            sent = all_to_device({**of_drafts, **due.arrays, **of_sampling}, self.device)
        self._clock.reach(Stage.PLAN)
        # Draft with the model drafter, whose KV cache may have to catch up first, and lay out.
        with drafting(self._draft_worker), spec_stage_span("draft"):
            self._catch_up.store(sent)
            if due.rows:
                self._states.use_base_width()
                self._catch_up.run(batch, plan, due, sent)
            self._states.use_width(plan.width)
            model_trees = self._step_drafts.draft(batch, plan, sent)
            self._clock.reach(Stage.DRAFT)
            verify_input = self._step_drafts.lay_out(batch, plan, model_trees, sent)
        self._clock.reach(Stage.LAYOUT)
        # Verify, and record what is accepted: its tokens start their way to the host.
        verify_input.sample = partial(self._node_sampler.sample, plan, batch, sent)
        batch.spec_info = verify_input
        result = self._verifications.run(batch, plan, verify_input, grammar_barrier)
        is_model_node, num_model_accepted = verify_input.is_model_node, None
        if is_model_node is not None:
            num_model_accepted = num_accepted_of_model(result.accept_index, is_model_node)
        self._launched.record_verify(
            plan, result.next_token_ids, result.accept_lens, num_model_accepted
        )
        if on_publish is not None:  # before draft-extend: SGLang prepares the next step meanwhile
            on_publish(result.new_seq_lens)
        # Bring the draft KV cache up to date, now or later.
        with drafting(self._draft_worker), spec_stage_span("draft_extend"):
            self._extend(batch, plan, result, verify_input)
        give_last_hidden_states(batch, result)
        return result

    def _extend(
        self,
        batch: ScheduleBatch,
        plan: StepPlan,
        result: GenerationBatchResult,
        verify_input: HvdVerifyInput,
    ) -> None:
        if not self._draft_extend.follows(plan.num_plain):
            self._stub_skipped_draft_extend(batch, result)
            self._catch_up.keep(plan, result)
            return
        # In a step that runs ahead, the device may not have reached the last draft-extend. Waiting
        # is free then: the device still has this step's verification to do.
        self._extend_fence.wait()
        with self._costs.time_extend(len(batch.reqs), plan.width):
            self._draft_worker.extend(batch, result, plan.width, verify_input.kv_loc_plan)
        self._extend_fence.record()

    def plan_ahead(self, batch: ScheduleBatch, *, gives_lengths: bool) -> bool:
        """Does what needs no tokens of the last step, before SGLang waits for them. Plans the step
        that SGLang is about to launch if that step runs ahead, and returns whether it does.

        gives_lengths: see StepPlan.
        """
        if batch.forward_mode.is_decode():
            self._costs.prepare(len(batch.reqs))
        if self._run_ahead is not None:
            self._ahead = self._run_ahead.step_plan(batch, gives_lengths=gives_lengths)
        return self._ahead is not None

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """SGLang's hook for a request that ended while running, by itself or aborted."""
        self._launched.note_finished(rid)

    def note_finished_at_prefill(self, req: Req) -> None:
        """A request ended with its prefill. SGLang does not tell its workers of that; the hook
        scheduler_events.note_finished does."""
        self._launched.note_finished_at_prefill(req)

    def clear_cache_pool(self) -> None:
        """flush_cache and weight updates: drafts from before would only be rejected."""
        self._launched.commit()  # its drafts are from before the flush
        self._held.drop_ended()
        self._drafter.flush()
        # Copies of hidden states, of requests that have ended or will be prefilled again.
        self._catch_up.clear()

    def on_idle(self) -> None:
        """Nothing runs. Drops requests that ended unannounced, and publishes the metrics."""
        self._clock.end_step()
        self._costs.interrupt()
        self._held.drop_ended()
        # SGLang calls this again and again while it is idle: only the first call has news.
        self._publish(at_once=not self._is_idle)
        self._is_idle = True
        self._served_cache.warm(is_idle=True)

    def on_pause(self) -> None:
        """SGLang pauses until it is told to continue, and does not call on_idle. The pause must not
        count as part of a step."""
        self._clock.end_step()
        self._costs.interrupt()
        self._publish(at_once=True)

    def drop(self, req: Req) -> None:
        """A request was aborted while it waited."""
        self._held.drop(req)

    def use_predictor(self, path: Path) -> None:
        """Predicts with another predictor from the next step on. Raises ValueError if it cannot be
        used; then the old one stays."""
        self._served_predictor.replace(path)

    def control_cache(self, order: Order) -> dict[str, Any]:
        """Carries out an administrator's order to the shared cache. Raises ValueError if it cannot
        be carried out."""
        return self._served_cache.answer(order)

    def on_shutdown(self) -> None:
        """SGLang ends the scheduler in order."""
        self._served_cache.close()

    def describe(self) -> dict[str, Any]:
        """Settings and counters for /server_info, as JSON values."""
        self._held.drop_ended()
        return {
            **self._figures.describe(len(self._held)),
            "predictor": self._served_predictor.describe(),
            "costs": self._costs.describe(),
            **self._served_cache.describe(),
            "config": self._launch.config.model_dump(mode="json"),
            "verifies_trees": self._verifies_trees,
            "model_tree_width": self._launch.model_tree_width,
            "runs_ahead": self._run_ahead is not None,
            "draft_extend": self._draft_extend.value,
            "num_catch_ups": self._catch_up.num_catch_ups,
            **self._states.describe(),
            **self._step_drafts.describe(),
        }

    def _record_prefill(self, batch: ScheduleBatch, next_token_ids: torch.Tensor) -> None:
        self._launched.record_prefill(batch.reqs, batch.chunked_req, next_token_ids)
        self._catch_up.forget(batch.reqs)

    def _publish(self, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() <= self._published_at + _PUBLISH_SECONDS:
            return
        self._figures.publish(len(self._held))
        self._served_predictor.publish()
        self._published_at = time.monotonic()


def _lengths_of(batch: ScheduleBatch) -> Int64 | None:
    """Tokens of each request in the KV cache; None if the host does not know them."""
    return None if batch.seq_lens_cpu is None else batch.seq_lens_cpu.numpy()


@contextmanager
def _draft_workers_by(make: Callable[..., HvdDraftWorker]) -> Iterator[None]:
    # EAGLEWorkerV2.__init__ builds its draft worker by the module's name for the class, and offers
    # no other way to choose it.
    original = eagle_worker_v2.EagleDraftWorker
    eagle_worker_v2.EagleDraftWorker = make
    try:
        yield
    finally:
        eagle_worker_v2.EagleDraftWorker = original
