"""Times the parts of a decode step on the running engine, before it serves.

Every forward is one that serving runs, through the same graphs where there are any. Its requests
do not exist: all their KV slots are the slot that SGLang keeps for padding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec

from sglang_hvd.allocation import MAX_WIDE_REQUESTS, DraftExtend
from sglang_hvd.costs import StepCosts, costs_of_times
from sglang_hvd.plugin.engine.draft_worker import drafting
from sglang_hvd.plugin.trees.draft_trees import DraftNodes
from sglang_hvd.plugin.trees.verify_input import MaskPlace, build_verify_input

if TYPE_CHECKING:
    from sglang_hvd.plugin.engine.draft_worker import HvdDraftWorker
    from sglang_hvd.plugin.engine.states.step_states import StepStates

# The shortest time counts (costs_of_times).
# Rounds over the whole table are so far apart that the start of another process falls into one.
_NUM_ROUNDS, _NUM_RUNS = 3, 2

# Tokens of context of each request, and as many times more for the price of a token.
_CONTEXT_TOKENS, _LONGER = 512, 4

# The device works this long before what is timed: four milliseconds at 2 GHz, longer than the host
# needs to prepare a run.
_CYCLES_BEFORE = 8_000_000

# A step of more nodes is not timed: the table goes on with its last slope.
_MAX_NODES = 4096


class CostProfile:
    """Times the parts of a server's steps for one table."""

    def __init__(
        self, draft_worker: HvdDraftWorker, states: StepStates, draft_extend: DraftExtend
    ) -> None:
        self._draft_worker, self._states = draft_worker, states
        self._widths = states.widths
        self._is_postponed = draft_extend is DraftExtend.WHEN_DRAFTING
        self._target = draft_worker.target_worker.model_runner
        self._device = torch.device(draft_worker.device)
        longest = self._target.model_config.context_len - self._widths.widest - 1
        self._context = max(min(_CONTEXT_TOKENS, longest), self._widths.widest)
        self._long_context = max(min(_LONGER * _CONTEXT_TOKENS, longest), self._context)
        self._hidden: torch.Tensor | None = None  # one of the target's hidden states

    def table(self, max_requests: int) -> StepCosts:
        """The costs of up to so many requests, or of as many as _MAX_NODES allows."""
        max_requests = max(min(max_requests, _MAX_NODES // self._widths.values[0]), 1)
        batch_sizes = [1]
        while batch_sizes[-1] < max_requests:
            batch_sizes.append(min(4 * batch_sizes[-1], max_requests))
        if self._widths.widest > self._widths.base and max_requests > MAX_WIDE_REQUESTS:
            batch_sizes.insert(1, MAX_WIDE_REQUESTS)
        # Not inference mode: a forward could not write again what it makes once and keeps.
        with torch.no_grad():
            rounds = [[self._times(n) for n in batch_sizes] for _ in range(_NUM_ROUNDS)]
            n, width = batch_sizes[-1], self._widths.values[0]
            longer = [
                self._ms(partial(self._verify, n, width, self._long_context))
                for _ in range(_NUM_ROUNDS)
            ]
        verify, extend, draft = (
            np.array([[of_batch[part] for of_batch in of_round] for of_round in rounds])
            for part in range(3)
        )
        return costs_of_times(
            batch_sizes,
            verify,
            extend,
            draft,
            widths=self._widths.values,
            draft_steps=self._draft_steps(),
            longer=np.array(longer),
            contexts=(self._context, self._long_context),
            about="timed on this server before it served",
        )

    def _times(self, n: int) -> tuple[list[float], list[float], list[float]]:
        """Milliseconds of verifications and draft-extends by width, nan where a step is not timed,
        and of drafts by number of steps."""
        timed = [w for w in self._widths.of_step(n) if n * w <= _MAX_NODES]
        untimed = [math.nan] * (len(self._widths.values) - len(timed))
        verify = [self._ms(partial(self._verify, n, w, self._context)) for w in timed]
        with drafting(self._draft_worker):
            draft = [self._ms(partial(self._draft, n, steps)) for steps in self._draft_steps()]
            extend = [self._ms(partial(self._extend, n, w)) for w in timed]
        return verify + untimed, extend + untimed, draft

    def _draft_steps(self) -> list[int]:
        """The numbers of steps that are timed: all of them, and a few if there is a choice."""
        *fewer, all_steps = self._states.of_draft_steps.num_steps
        few = [
            steps for steps in fewer if steps > 1
        ] or fewer  # a single step prepares no attention
        return [*few[:1], all_steps]

    def _ms(self, prepare: Callable[[], Callable[[], object]]) -> float:
        """The shortest time of a run that `prepare` returns, in milliseconds. On a GPU it is the
        device's time after other work, as in serving: the host prepares the run meanwhile, except
        for what SGLang makes it wait for."""
        times = []
        for _ in range(_NUM_RUNS + 1):
            run = prepare()
            if self._device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(_CYCLES_BEFORE)
                begin.record()
                run()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
            else:
                began = time.perf_counter()
                run()
                times.append(1000 * (time.perf_counter() - began))
        return min(times[1:])

    def _verify(self, n: int, width: int, context: int) -> Callable[[], object]:
        self._states.use_width(width)
        runner = self._target
        seq_lens = self._full(n, context)
        nodes = DraftNodes(
            token_ids=self._unlike_tokens(n * width).view(n, width),
            parents=torch.arange(-1, width - 1, device=self._device).expand(n, width),
            num_used=self._full(n, width),
        )
        verify_input = build_verify_input(
            nodes,
            seq_lens,
            MaskPlace(self._draft_worker.mask_mode, runner.attn_backend.verify_mask),
            topk=self._draft_worker.topk,
            num_cached=n * context,
        )
        verify_input.capture_hidden_mode = CaptureHiddenMode.FULL
        verify_input.seq_lens_cpu, verify_input.seq_lens_sum = seq_lens.cpu(), n * context
        forward_batch = self._batch(
            ForwardMode.TARGET_VERIFY,
            n,
            width,
            verify_input,
            context=context,
            positions=verify_input.positions,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        runner.kv_index_translator.bind_runner_slots(forward_batch)

        def run() -> None:
            graphs = runner.decode_cuda_graph_runner
            if graphs and graphs.can_run_graph(forward_batch):
                graphs.load_batch(forward_batch)
                forward_batch.mark_forward_metadata_ready()
            output = runner.forward(forward_batch).logits_output
            torch.argmax(output.next_token_logits, dim=-1)
            self._hidden = output.hidden_states[:1].clone()

        return run

    def _draft(self, n: int, num_steps: int) -> Callable[[], object]:
        draft_worker = self._draft_worker
        draft_runner, topk = draft_worker.draft_runner, draft_worker.topk
        hidden_size, dtype = get_draft_recurrent_hidden_state_spec(draft_runner)
        draft_input = EagleDraftInput(
            topk_p=torch.full((n, topk), 1 / topk, device=self._device),
            topk_index=self._full((n, topk), 0),
            hidden_states=torch.zeros((n, hidden_size), dtype=dtype, device=self._device),
            capture_hidden_mode=CaptureHiddenMode.LAST,
            bonus_tokens=self._full(n, 0),
            num_tokens_per_req=topk,
            num_tokens_for_logprob_per_req=topk,
        )
        draft_input.positions = self._full(n * topk, self._context)
        forward_batch = self._batch(
            ForwardMode.DECODE,
            n,
            topk * num_steps,
            draft_input,
            context=self._context,
            positions=draft_input.positions,
            capture_hidden_mode=CaptureHiddenMode.LAST,
        )
        draft_runner.kv_index_translator.bind_runner_slots(forward_batch)

        return partial(self._states.of_draft_steps.run, forward_batch, num_steps)

    def _extend(self, n: int, width: int) -> Callable[[], object]:
        self._states.use_width(width)
        draft_worker, draft_runner = self._draft_worker, self._draft_worker.draft_runner
        assert self._hidden is not None, "a verification runs first"
        hidden = self._hidden.expand(n * width, -1).contiguous()
        mode = ForwardMode.EXTEND if self._is_postponed else ForwardMode.DRAFT_EXTEND_V2
        capture = CaptureHiddenMode.LAST if self._is_postponed else CaptureHiddenMode.FULL
        last = torch.arange(width - 1, n * width, width, device=self._device)
        start = self._context - width
        num_tokens = 1 if self._is_postponed else width
        extend_input = EagleDraftExtendInput(
            hidden_states=hidden,
            num_correct_drafts=self._full(n, width - 1),
            num_accept_tokens=self._full(n, width),
            num_tokens_per_req=num_tokens,
            num_tokens_for_logprob_per_req=num_tokens,
        )
        forward_batch = self._batch(
            mode,
            n,
            width,
            extend_input,
            context=self._context,
            positions=torch.arange(start, start + width, device=self._device).repeat(n),
            capture_hidden_mode=capture,
        )
        forward_batch.extend_num_tokens = n * width
        forward_batch.extend_seq_lens_cpu = [width] * n
        forward_batch.extend_prefix_lens_cpu = [start] * n
        forward_batch.extend_seq_lens = self._full(n, width, torch.int32)
        forward_batch.extend_prefix_lens = self._full(n, start, torch.int32)
        forward_batch.extend_start_loc = torch.arange(
            0, n * width, width, dtype=torch.int32, device=self._device
        )
        draft_runner.kv_index_translator.bind_runner_slots(forward_batch)

        def run() -> None:
            if self._is_postponed:
                draft_runner.forward(forward_batch)
                return
            graphs = draft_worker.cuda_graph_runner_for_draft_extend
            if graphs and graphs.can_run_graph(forward_batch):
                graphs.execute(forward_batch, last)
                return
            draft_runner.attn_backend.init_forward_metadata(forward_batch)
            forward_batch.mark_forward_metadata_ready()
            draft_runner.forward(forward_batch)

        return run

    def _batch(
        self,
        mode: ForwardMode,
        n: int,
        tokens_per_request: int,
        spec_info: Any,
        *,
        context: int,
        positions: torch.Tensor,
        capture_hidden_mode: CaptureHiddenMode,
    ) -> ForwardBatch:
        seq_lens = self._full(n, context)
        is_draft = mode.is_decode()
        forward_batch = ForwardBatch(
            forward_mode=mode,
            batch_size=n,
            input_ids=None if is_draft else self._unlike_tokens(n * tokens_per_request),
            req_pool_indices=self._full(n, 0),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens.cpu(),
            seq_lens_sum=n * context,
            orig_seq_lens=seq_lens.to(torch.int32),
            out_cache_loc=self._full(n * tokens_per_request, 0),
            positions=positions,
            return_logprob=False,
            spec_algorithm=self._target.spec_algorithm,
            spec_info=spec_info,
            capture_hidden_mode=capture_hidden_mode,
            global_forward_mode=mode,
        )
        # Expert parallelism leaves out what it takes for padding.
        forward_batch._init_num_token_non_padded(device=self._device, is_draft_worker=is_draft)
        return forward_batch

    def _unlike_tokens(self, num: int) -> torch.Tensor:
        """int64[num]; spread over the vocabulary. Equal ones would all go to the same experts of a
        model that has some, and a wide step would take no longer than a narrow one."""
        places = torch.arange(num, device=self._device)
        return places * 2_654_435_761 % self._target.model_config.vocab_size

    def _full(
        self, shape: int | tuple[int, ...], value: int, dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        return torch.full(
            shape if isinstance(shape, tuple) else (shape,), value, dtype=dtype, device=self._device
        )
