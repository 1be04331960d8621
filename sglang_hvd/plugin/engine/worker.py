"""SGLang's EAGLE worker with a choice of draft per request and per step.

Each decode step: plan (suffix cache, features, predictor, allocation), run the model drafter if a
request needs it, verify every request's chosen draft in one forward, hand the committed tokens
back. Draft-extend keeps the model drafter's KV cache right through all steps, also those that
verified cache drafts, at once or later (allocation/draft_extend.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.runtime_context import get_observability, get_parallel
from sglang.srt.speculative import eagle_worker_v2

from sglang_hvd.allocation import (
    DrafterChoices,
    DraftExtend,
    StepAllocator,
    StepCosts,
    draft_step_choices,
    max_tree_nodes,
    model_tree_sizes,
)
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.plugin.device import flashinfer_plans
from sglang_hvd.plugin.device.flashinfer_plans import (
    PlanFence,
    plan_drafts_on_host,
    plan_verifications_on_host,
    uses_flashinfer,
)
from sglang_hvd.plugin.device.host_transfer import copy_stream
from sglang_hvd.plugin.device.memory import DeviceMemory
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.engine.catch_up import draft_extend_of
from sglang_hvd.plugin.engine.draft_states import DraftStates
from sglang_hvd.plugin.engine.draft_worker import HvdDraftWorker
from sglang_hvd.plugin.engine.kept_costs import costs_folder, profiled_costs
from sglang_hvd.plugin.engine.served_costs import ServedCosts, before_any_step
from sglang_hvd.plugin.engine.served_predictor import ServedPredictor
from sglang_hvd.plugin.engine.width_states import WidthStates
from sglang_hvd.plugin.requests.held_requests import HeldRequests
from sglang_hvd.plugin.requests.metrics import PredictorMetrics, ServerMetrics
from sglang_hvd.plugin.requests.recording import RequestRecorder
from sglang_hvd.plugin.requests.token_strings import token_strings
from sglang_hvd.plugin.startup.launch import HvdLaunch, launch_of
from sglang_hvd.plugin.startup.supported import require_hooks
from sglang_hvd.plugin.startup.verify_widths import may_run_ahead
from sglang_hvd.plugin.trees import accepted_kv
from sglang_hvd.plugin.trees.layout import warm_up
from sglang_hvd.plugin.trees.verify_input import num_accepted_of_model

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

logger = logging.getLogger(__name__)

# That EAGLE3 takes of a token, each of another layer.
_NUM_HIDDEN_STATES = 3

# The metrics are as old as this while steps run: bringing them up to date takes some 50 us.
_PUBLISH_SECONDS = 0.2


class HvdWorker(eagle_worker_v2.EAGLEWorkerV2):
    """EAGLE worker whose drafts come from the suffix cache or the model drafter, whichever pays."""

    speculative_num_draft_tokens: int
    topk: int
    # Of the step that runs ahead: its backends need lengths on the host, which SGLang did not read.
    gives_lengths = False

    def __init__(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        require_hooks()
        launch = launch_of(server_args)
        assert launch is not None, "create_worker chose HvdWorker without a launch"
        with _draft_worker_class(HvdDraftWorker):
            super().__init__(server_args, *args, **kwargs)
        self._launch: HvdLaunch = launch
        # The arguments themselves hold what was asked for, and not what SGLang made of it.
        self._runs_ahead = may_run_ahead(launch.config, resolved_view(server_args))
        self._verified = PlanFence.of(self.device)
        self._clock = self._draft_worker.clock
        self._published_at = 0.0
        self._is_idle = False
        runners = self.target_worker.model_runner, self._draft_worker.draft_runner
        self._has_mrope = any(runner.model_config.model_is_mrope for runner in runners)
        self._draft_extend = self._choose_draft_extend()
        has_window = bool(self.target_worker.model_runner.sliding_window_size)
        launch.check_draft_shapes(self.topk, has_window=has_window)
        self._verifies_trees = launch.may_branch(self.topk, has_window=has_window)
        if not self._verifies_trees and launch.config.policy == "allocate":
            logger.info(
                "HVD: with topk 1, this model's attention or --enable-deterministic-inference asks "
                "for chains: each request verifies one draft, which does not branch."
            )
        allocator = self._allocator = _allocator(
            launch,
            self.speculative_num_steps,
            self.topk,
            merges=self._verifies_trees,
            draft_extend=self._draft_extend,
        )
        has_ranks = get_parallel().tp_size > 1
        ranks = RankGroup(get_parallel().tp_group.cpu_group if has_ranks else None)
        self._ranks = ranks
        drafter = HybridDrafter.from_config(
            launch.config,
            token_strings=token_strings(),
            num_model_steps=self.speculative_num_steps,
            num_model_nodes=launch.num_model_nodes,
            verify_width=launch.widths.widest,
            allocator=allocator,
            verifies_trees=self._verifies_trees,
            deterministic=has_ranks,
            clock=self._clock,
        )
        self._served_predictor = ServedPredictor(
            drafter,
            launch.config,
            ranks=ranks,
            metrics=PredictorMetrics() if _is_metrics_rank() else None,
        )
        self._costs = ServedCosts(
            allocator,
            is_fixed=launch.config.costs is not None,
            widths=launch.widths.values,
            device=self.device,
            ranks=ranks,
            clock=self._clock,
        )
        self._held = HeldRequests(
            drafter,
            stream=copy_stream(self.device),
            metrics=ServerMetrics() if _is_metrics_rank() else None,
            clock=self._clock,
            report_cycles=launch.config.report_cycles,
            recorder=_recorder(launch),
            vocab_size=self.target_worker.model_runner.model_config.vocab_size,
        )
        self._draft_worker.attach(
            held=self._held,
            costs=self._costs,
            draft_extend=self._draft_extend,
            stub_draft_extend=self._stub_skipped_draft_extend,
        )

    def init_cuda_graphs(self) -> None:
        """SGLang's call when pools and attention backends are there: captures graphs. With them
        steps can be timed."""
        target = self.target_worker.model_runner
        most_nodes = self._launch.widths.max_nodes(target.max_running_requests)
        if self.device == "cuda":
            check_sampling(most_nodes, target.model_config.vocab_size)
        plan_drafts_on_host()
        super().init_cuda_graphs()
        self._has_host_plans = plan_verifications_on_host(target.attn_backend)
        memory = DeviceMemory(
            target,
            device=self.device,
            gpu_id=self.gpu_id,
            most_nodes=most_nodes,
            ranks=self._ranks,
            kept_gb=self._kept_gb(target, most_nodes),
        )
        if self._launch.has_width_states:
            self._build_width_states(memory)
        self._build_draft_states(memory)
        self._compile_kernels()
        self._check_run_ahead()
        self._draft_extend = self._choose_draft_extend()
        self._draft_worker.use_draft_extend(self._draft_extend)
        if self._runs_ahead and self._allocator is not None:
            self._allocator.run_ahead()
            self._costs.run_ahead()
        if self._times_costs:
            self._time_costs()

    def _build_width_states(self, memory: DeviceMemory) -> None:
        states = WidthStates(
            self,
            self._launch.widths,
            memory,
            has_draft_extend=self._draft_extend.follows(num_plain=0),
        )
        self._draft_worker.use_width_states(states)
        self._launch = replace(self._launch, widths=self._launch.widths.only(states.widths))
        if self._allocator is not None:
            self._allocator.use_widths(states.widths)

    def _kept_gb(self, target: Any, most_nodes: int) -> float:
        """Hidden states of what the draft KV cache lacks, and as many again while it is caught up
        with. most_nodes: verified in a step."""
        of_token = _NUM_HIDDEN_STATES * target.model_config.hidden_size * target.dtype.itemsize
        return 2.0 * self._draft_extend.max_missing(most_nodes) * of_token / 2**30

    def _choose_draft_extend(self) -> DraftExtend:
        return draft_extend_of(
            self._launch.config,
            device=self.device,
            has_mrope=self._has_mrope,
            runs_ahead=self._runs_ahead,
        )

    def _check_run_ahead(self) -> None:
        """Raises ValueError if steps are asked to run ahead and cannot."""
        # FlashInfer's own plans wait for the last step, and there is nothing to gain.
        plans_wait = uses_flashinfer() and not self._has_host_plans
        self._runs_ahead &= self._launch.widths.values[0] == 1 and not plans_wait
        if self._launch.config.run_ahead and not self._runs_ahead:
            raise ValueError(
                "--hvd-set run_ahead=true needs a verify width of 1, overlap scheduling (which is "
                "off on a CPU and with --disable-overlap-schedule) and, with FlashInfer, CUDA "
                "graphs and host_plans (docs/operation.md): drop it or change these"
            )

    def _build_draft_states(self, memory: DeviceMemory) -> None:
        allocator = self._allocator
        num_steps = (self.speculative_num_steps,) if allocator is None else allocator.num_steps
        states = DraftStates(self, num_steps, memory)
        self._draft_worker.draft_states = states
        if allocator is not None:
            allocator.use_num_steps(states.num_steps)

    def _compile_kernels(self) -> None:
        warm_up(
            torch.device(self.device),
            self._draft_worker.mask_mode,
            self._launch.widths.values,
            [
                min(self._launch.num_model_nodes, max_tree_nodes(self.topk, steps))
                for steps in self._draft_worker.draft_states.num_steps
            ],
            self.topk,
        )
        accepted_kv.warm_up(self.target_worker.model_runner.token_to_kv_pool)
        if self._has_host_plans:
            flashinfer_plans.warm_up(torch.device(self.device), self._launch.widths.values)

    @property
    def _times_costs(self) -> bool:
        """Whether steps are timed before the server serves."""
        config = self._launch.config
        return (
            config.policy == "allocate"
            and config.costs is None
            and config.cost_profile != "skip"
            and not self._has_mrope  # such positions need real requests: the first steps tell
        )

    def _time_costs(self) -> None:
        self._costs.begin_with(
            profiled_costs(
                self._draft_worker,
                self._launch.widths,
                model_tree_width=self._launch.model_tree_width,
                draft_extend=self._draft_extend,
                has_host_plans=self._has_host_plans,
                use_kept=self._launch.config.cost_profile == "kept",
                folder=costs_folder(),
                most_requests=self.target_worker.model_runner.max_running_requests,
                ranks=self._ranks,
            )
        )

    def forward_batch_generation(
        self, batch: ScheduleBatch, *args: Any, **kwargs: Any
    ) -> GenerationBatchResult:
        """One step of SGLang's scheduler: a prefill, or one decoding cycle of every request."""
        self._is_idle = False
        is_prefill = batch.forward_mode.is_extend()
        if is_prefill:
            self._clock.end_step()
            self._costs.interrupt()
            self._draft_worker.use_base_width()
        else:
            self._clock.begin_step()
            self._costs.begin_step(len(batch.reqs), is_ahead=self._held.is_ahead)
            if self._held.is_ahead and self.gives_lengths:
                # For this step alone: SGLang restores what the batch had.
                cached_lens = self._held.cached_lens(batch.reqs)
                batch.seq_lens_cpu = torch.tensor(cached_lens)
                batch.seq_lens_sum = sum(cached_lens)
                assert self.device == "cuda" or batch.seq_lens.tolist() == cached_lens
        self._publish()
        result = super().forward_batch_generation(batch, *args, **kwargs)
        if not is_prefill:
            self._costs.end_step()
        return result

    def verify(
        self, batch: ScheduleBatch, pp_proxy_tensors: Any = None, grammar_barrier: Any = None
    ) -> GenerationBatchResult:
        """Verify the chosen drafts; the committed tokens start their way to the host at once."""
        # With topk above 1 SGLang moves the accepted path to the front of each row, in the KV cache
        # of every layer too, as any tree needs; with topk 1 it leaves it where it is, and where a
        # chain stands already. Nothing else in a verification looks at the worker's topk.
        verify_input = batch.spec_info
        base_width, topk = self.speculative_num_draft_tokens, self.topk
        self.speculative_num_draft_tokens = verify_input.draft_token_num
        self.topk = max(topk, 2) if verify_input.has_branches else 1
        self._verified.wait()
        try:
            with ExitStack() as until_verified:

                def begin() -> None:
                    self._verified.record()
                    until_verified.enter_context(
                        self._costs.time_verify(
                            len(batch.reqs),
                            verify_input.draft_token_num,
                            num_context=self._held.num_context,
                        )
                    )

                with _before_forward(self.target_worker, begin):
                    result = super().verify(batch, pp_proxy_tensors, grammar_barrier)
        finally:
            self.speculative_num_draft_tokens, self.topk = base_width, topk
        if batch.return_hidden_states and not verify_input.has_branches:
            # For a client, who gets them later. SGLang copied them with the path, if it moved that;
            # else they are where the graphs of draft-extend may write.
            output = result.logits_output
            output.hidden_states = output.hidden_states.clone()
        is_model_node, num_model_accepted = verify_input.is_model_node, None
        if is_model_node is not None:
            num_model_accepted = num_accepted_of_model(result.accept_index, is_model_node)
        self._held.record_verify(
            batch.reqs, result.next_token_ids, result.accept_lens, num_model_accepted
        )
        return result

    def runs_ahead(self, batch: ScheduleBatch) -> bool:
        """Whether the step that SGLang is about to launch is plain, and need not wait for the
        tokens of the last."""
        return (
            self._runs_ahead
            and batch.forward_mode.is_decode()
            and not batch.has_grammar  # of which SGLang waits for each token
            and not self._draft_worker.ends_run(len(batch.reqs))
            and self._held.runs_ahead(batch.reqs)
        )

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """SGLang's hook for a request that ended while running, by itself or aborted."""
        self._held.note_finished(rid)

    def note_finished_at_prefill(self, req: Req) -> None:
        """A request ended with its prefill, which SGLang has no hook for."""
        self._held.note_finished_at_prefill(req)

    def clear_cache_pool(self) -> None:
        """flush_cache and weight updates: drafts from before would only be rejected."""
        self._held.flush()
        # Copies of hidden states, for requests that have ended or will be prefilled anew.
        if self._draft_worker.catch_up is not None:
            self._draft_worker.catch_up.clear()

    def on_idle(self) -> None:
        """Nothing runs: requests that ended unannounced are let go and the metrics show it."""
        self._clock.end_step()
        self._costs.interrupt()
        self._held.drop_ended()
        # SGLang polls while it is idle, unless it sleeps: what is new at first is shown at once.
        self._publish(at_once=not self._is_idle)
        self._is_idle = True

    def on_pause(self) -> None:
        """SGLang pauses until it is told to go on, and is not idle: no step lasts that long."""
        self._clock.end_step()
        self._costs.interrupt()
        self._publish(at_once=True)

    def let_go(self, req: Req) -> None:
        """A request was aborted while it waited."""
        self._held.let_go(req)

    def use_predictor(self, path: Path) -> None:
        """Predict with another predictor from the next step on. Raises ValueError if it cannot be
        used; then the old one stays."""
        self._served_predictor.replace(path)

    def _publish(self, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() <= self._published_at + _PUBLISH_SECONDS:
            return
        self._held.publish()
        self._served_predictor.publish()
        self._published_at = time.monotonic()

    def describe(self) -> dict[str, Any]:
        """Settings and counters for /server_info; plain values."""
        states, catch_up = self._draft_worker.width_states, self._draft_worker.catch_up
        return {
            **self._held.describe(),
            "predictor": self._served_predictor.describe(),
            "costs": self._costs.describe(),
            "config": self._launch.config.model_dump(mode="json"),
            "verify_width": self._launch.widths.base,
            "verify_widths": list(self._launch.widths.values),
            "width_memory_gb": None if states is None else states.memory_gb,
            "draft_steps": list(self._draft_worker.draft_states.num_steps),
            "draft_steps_memory_gb": self._draft_worker.draft_states.memory_gb,
            "verifies_trees": self._verifies_trees,
            "model_tree_width": self._launch.model_tree_width,
            "num_model_draft_rounds": self._draft_worker.num_model_draft_rounds,
            "num_partial_draft_rounds": self._draft_worker.num_partial_draft_rounds,
            "host_plans": self._has_host_plans,
            "runs_ahead": self._runs_ahead,
            "draft_extend": self._draft_extend.name.lower(),
            "num_catch_ups": 0 if catch_up is None else catch_up.num_catch_ups,
            "num_steps_by_width": dict(self._draft_worker.num_steps_by_width),
            "num_drafts_by_steps": dict(sorted(self._draft_worker.num_drafts_by_steps.items())),
        }


def check_sampling(most_nodes: int, vocab_size: int) -> None:
    """SGLang's kernel for sampled verifications (sampling.cuh) numbers the probabilities of a step
    by 32 bits. Raises ValueError if so many nodes, of all requests together, have more."""
    if most_nodes * vocab_size > 2**32:
        raise ValueError(
            "SGLang's sampling kernel numbers the probabilities of a step by 32 bits, and "
            f"{most_nodes} nodes of all requests and {vocab_size} words have more: lower "
            "--max-running-requests, --hvd-verify-width or --hvd-set wide_width"
        )


def _allocator(
    launch: HvdLaunch,
    num_steps: int,
    topk: int,
    *,
    merges: bool,
    draft_extend: DraftExtend,
) -> StepAllocator | None:
    if launch.config.policy != "allocate":
        return None
    costs = launch.config.costs
    sizes = model_tree_sizes(launch.num_model_nodes)
    if topk == 1:  # a chain, which is cut by its steps
        sizes = sizes[-1:]
    steps = draft_step_choices(num_steps)
    return StepAllocator(
        before_any_step(launch.widths.values) if costs is None else StepCosts.load(costs),
        widths=launch.widths.values,
        base_width=launch.widths.base,
        drafters=[DrafterChoices(sizes, steps, tuple(max_tree_nodes(topk, num) for num in steps))],
        merges=merges,
        draft_extend=draft_extend,
    )


def _is_metrics_rank() -> bool:
    # Every tensor-parallel rank plans the same cycles; one of them counts.
    return get_observability().enable_metrics and get_parallel().tp_rank == 0


def _recorder(launch: HvdLaunch) -> RequestRecorder | None:
    # Every tensor-parallel rank serves the same requests; one of them records.
    if launch.config.record is None or get_parallel().tp_rank != 0:
        return None
    return RequestRecorder(launch.config)


@contextmanager
def _before_forward(worker: Any, then: Callable[[], None]) -> Iterator[None]:
    """Calls `then` meanwhile, before the forward of a verification that is laid out and planned:
    while the host does that, a device that has nothing else to do waits for it."""
    forward, own = worker.forward_batch_generation, vars(worker).get("forward_batch_generation")
    was_called = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal was_called
        was_called = True
        then()
        return forward(*args, **kwargs)

    worker.forward_batch_generation = call
    try:
        yield
    finally:
        if own is None:
            del worker.forward_batch_generation
        else:
            worker.forward_batch_generation = own
    assert was_called, "SGLang no longer verifies by the target worker's forward_batch_generation"


@contextmanager
def _draft_worker_class(cls: type) -> Iterator[None]:
    # EAGLEWorkerV2.__init__ builds its draft worker by the module's name for it, and offers no
    # other way to choose the class.
    original = eagle_worker_v2.EagleDraftWorker
    eagle_worker_v2.EagleDraftWorker = cls
    try:
        yield
    finally:
        eagle_worker_v2.EagleDraftWorker = original
