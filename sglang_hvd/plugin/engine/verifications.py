"""Runs SGLang's verification at each step's width, and gives clients the hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.speculative.eagle_worker_common import _compact_accept_to_front

from sglang_hvd.plugin.device.flashinfer_plans import PlanFence
from sglang_hvd.plugin.engine.served_costs import ServedCosts
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.plugin.trees.verify_input import HvdVerifyInput
from sglang_hvd.step_clock import Stage, StepClock

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2


class Verifications:
    """Runs the target model over all nodes of a step, and accepts what it agrees with."""

    def __init__(self, worker: EAGLEWorkerV2, costs: ServedCosts, clock: StepClock) -> None:
        self._worker, self._costs, self._clock = worker, costs, clock
        self._fence = PlanFence.of(worker.device)

    def run(
        self,
        batch: ScheduleBatch,
        plan: StepPlan,
        verify_input: HvdVerifyInput,
        grammar_barrier: Any,
    ) -> GenerationBatchResult:
        """Verifies the drafts of the step, at its width."""
        # With topk above 1 SGLang moves the accepted path to the front of each row, in the KV cache
        # of every layer too, as any tree needs. With topk 1 it leaves the path where it is, where a
        # chain already stands. Nothing else in a verification reads the worker's topk.
        worker = self._worker
        base_width, topk = worker.speculative_num_draft_tokens, worker.topk
        worker.speculative_num_draft_tokens = plan.width
        worker.topk = max(topk, 2) if verify_input.has_branches else 1
        self._fence.wait()
        try:
            with ExitStack() as until_verified:

                def begin() -> None:
                    self._clock.reach(Stage.LAUNCH)
                    self._fence.record()
                    timing = self._costs.time_verify(
                        len(batch.reqs), plan.width, num_context=plan.num_context
                    )
                    until_verified.enter_context(timing)

                with _before_forward(worker.target_worker, begin):
                    result = worker.verify(batch, grammar_barrier=grammar_barrier)
        finally:
            worker.speculative_num_draft_tokens, worker.topk = base_width, topk
        # SGLang carries this array to its figures of what was proposed (hooks/proposed_drafts.py).
        result.cap_lens = verify_input.num_nodes
        if batch.return_hidden_states:
            output = result.logits_output
            output.last_hidden_states = self._accepted(output.last_hidden_states, result, plan)
        return result

    def _accepted(
        self, of_nodes: torch.Tensor, result: GenerationBatchResult, plan: StepPlan
    ) -> torch.Tensor:
        """A copy of what each node has, that of each accepted path at the front of its row. Without
        a copy the graphs of draft-extend may overwrite it before the client gets it."""
        return _compact_accept_to_front(
            of_nodes, result.accept_index, len(plan.held), num_draft_tokens=plan.width
        )


def keep_last_hidden_states(model: torch.nn.Module) -> None:
    """Lets the target model keep the hidden states of its last layer, besides those that the model
    drafter reads. Graphs that are captured later keep them too."""
    for module in model.modules():
        if isinstance(module, LogitsProcessor):
            module.keep_last_hidden_states = True


def give_last_hidden_states(batch: ScheduleBatch, result: GenerationBatchResult) -> None:
    """Puts the last layer's hidden states where SGLang reads those that a client asked for. Nothing
    of the step may read the model drafter's after that."""
    if batch.return_hidden_states:
        output = result.logits_output
        assert output.last_hidden_states is not None, "keep_last_hidden_states had no effect"
        output.hidden_states = output.last_hidden_states


@contextmanager
def _before_forward(worker: Any, then: Callable[[], None]) -> Iterator[None]:
    """Calls `then` just before the worker's forward, which runs inside. By then the verification is
    laid out and planned. An idle device waits for that, which must not count as verification."""
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
