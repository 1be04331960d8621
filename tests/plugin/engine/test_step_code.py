"""A decode step of an unchanged batch runs no Python code of this package for each request.

The real worker runs, from the plan to what is kept for a later draft-extend. The models' forward
passes and SGLang's calls are made up.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

import sglang_hvd
from sglang_hvd.allocation import DraftExtend
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.engine import missing_tokens
from sglang_hvd.plugin.engine import worker as worker_module
from sglang_hvd.plugin.engine.catch_up import CatchUp
from sglang_hvd.plugin.engine.run_ahead import RunAhead
from sglang_hvd.plugin.engine.served_costs import ServedCosts
from sglang_hvd.plugin.engine.step_drafts import StepDrafts
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.plugin.sampling import node_sampler
from sglang_hvd.plugin.sampling.node_sampler import NodeSampler
from sglang_hvd.plugin.trees.verify_input import HvdVerifyInput
from tests.plugin.engine.test_decode import Part
from tests.plugin.requests.served_requests import VOCAB_SIZE, WIDTHS, ServedRequests, request
from tests.plugin.sampling.test_node_sampler import Info

PACKAGE = str(Path(sglang_hvd.__file__).parent)
PROMPT = list(range(30))
# The first tokens follow on nothing. From then on the prompt says what comes next.
OUTPUT = [90, 91, 92, 93, 94, 95, 96, 97, *PROMPT]
FIRST_STEPS = 4  # in which arrays grow, and costs are worked out
Lines = Counter[str]


class Server:
    """A worker with requests of one kind that all get the same tokens."""

    def __init__(self, num: int, *, is_greedy: bool) -> None:
        self.reqs = [request(f"{row}", PROMPT) for row in range(num)]
        for req in self.reqs if not is_greedy else ():
            req.sampling_params.top_k = 5
            req.sampling_params.logit_bias = {"1": 0.0}
        served = ServedRequests(allocates=True)
        worker = self.worker = served.worker()
        target: Any = SimpleNamespace(
            sampler=lambda output, *_: output.next_token_logits.argmax(dim=-1),
            attn_backend=SimpleNamespace(verify_mask=None),
        )
        draft_worker: Any = SimpleNamespace(
            target_worker=SimpleNamespace(model_runner=target),
            device="cpu",
            topk=1,
            mask_mode=TreeMaskMode.QLEN_ONLY,
        )
        states: Any = Part("states", [])
        states.widths = SimpleNamespace(values=WIDTHS)
        clock, draft_extend = served.clock, DraftExtend.WHEN_DRAFTING
        worker.device, worker._clock, worker._draft_extend = "cpu", clock, draft_extend
        costs = worker._costs = ServedCosts(
            served.drafter._allocator,
            is_fixed=True,
            runs_ahead=True,
            device="cpu",
            ranks=RankGroup(),
            clock=clock,
        )
        catch_up = CatchUp(
            draft_worker, draft_extend, max_nodes=WIDTHS[-1] * num, costs=costs, clock=clock
        )
        worker._catch_up, worker._planner = catch_up, served.planner
        worker._run_ahead = RunAhead(served.drafter, served.held, served.launched, catch_up)
        worker._step_drafts = StepDrafts(draft_worker, states, costs=costs, clock=clock)
        worker._node_sampler = NodeSampler(target)
        worker._draft_worker, worker._states = draft_worker, states
        worker._verifications = SimpleNamespace(run=self._verify)
        worker._stub_skipped_draft_extend = lambda *_: None
        worker._served_cache, worker._published_at = Part("served_cache", []), float("inf")
        self._num_output = 1
        served.prefill(*self.reqs)
        self.batch: Any = SimpleNamespace(
            reqs=self.reqs,
            has_grammar=False,
            return_hidden_states=False,
            forward_mode=SimpleNamespace(
                is_decode=lambda: True, is_extend=lambda: False, is_idle=lambda: False
            ),
            sampling_info=Info.of(num),
            seq_lens=torch.full((num,), len(PROMPT)),
            spec_info=SimpleNamespace(bonus_tokens=torch.full((num,), 3)),
        )
        if is_greedy:
            self.batch.sampling_info.is_all_greedy = True
        else:
            self.batch.sampling_info.logit_bias = torch.zeros(num, VOCAB_SIZE)

    def step(self) -> tuple[StepPlan, Lines]:
        """Launches one step. Returns its plan, and the lines that ran."""
        batch, worker = self.batch, self.worker
        with counting() as lines:
            if not worker.plan_ahead(batch, gives_lengths=True):
                batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens, int(batch.seq_lens.sum())
            result = worker.forward_batch_generation(batch)
        num_tokens = int(result.accept_lens[0])
        for req in self.reqs:  # as SGLang does with the result of the step before this one
            req.kv.kv_committed_len = int(batch.seq_lens[0])
        batch.seq_lens = batch.seq_lens + num_tokens
        newest = result.next_token_ids.view(len(self.reqs), -1)[:, num_tokens - 1]
        batch.spec_info = SimpleNamespace(bonus_tokens=newest)
        self._num_output += num_tokens
        return self.plan, lines

    def _verify(
        self, batch: Any, plan: StepPlan, verify_input: HvdVerifyInput, _barrier: Any
    ) -> Any:
        """Every node of a path along the output gets its next token."""
        self.plan = plan
        num, width = len(plan.held), plan.width
        coming = OUTPUT[self._num_output - 1 :]
        tokens = torch.tensor(coming[:width])[verify_input.positions - batch.seq_lens[0]]
        logits = torch.nn.functional.one_hot(tokens, VOCAB_SIZE).float()
        assert verify_input.sample is not None
        predict, accept_lens, accept_index = verify_input.sample(
            verify_input, LogitsProcessorOutput(next_token_logits=logits), None
        )
        return SimpleNamespace(
            next_token_ids=predict[accept_index.clamp(min=0).to(torch.int64)].view(-1),
            accept_lens=accept_lens,
            new_seq_lens=batch.seq_lens + accept_lens,
            logits_output=SimpleNamespace(hidden_states=torch.zeros(num * width, 2)),
        )


@contextlib.contextmanager
def counting() -> Iterator[Lines]:
    """Counts how many bytecodes of each line of the package run inside."""
    lines: Lines = Counter()

    def trace(frame: FrameType, event: str, _arg: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return None
        if event == "opcode":
            lines[f"{name.removeprefix(PACKAGE)}:{frame.f_lineno}"] += 1
        frame.f_trace_opcodes = True
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_a_step_of_64_requests_runs_the_code_of_one_of_4(
    monkeypatch: pytest.MonkeyPatch, is_greedy: bool
) -> None:
    one_rank = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    monkeypatch.setattr(node_sampler, "get_parallel", lambda: one_rank)
    monkeypatch.setattr(worker_module, "drafting", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(missing_tokens, "_FIRST_ROOM", 4096)  # enough for all of these steps
    few, many = (Server(num, is_greedy=is_greedy) for num in (4, 64))
    kinds = []
    for number in range(FIRST_STEPS + 8):
        (plan, lines), (of_many, lines_of_many) = few.step(), many.step()
        kind = plan.runs_ahead, plan.width
        assert kind == (of_many.runs_ahead, of_many.width)
        if number < FIRST_STEPS:
            continue
        assert lines == lines_of_many, lines_of_many - lines
        kinds.append(kind)
        files = {line.partition(":")[0] for line in lines}
        assert {
            f"/plugin/{name}.py"
            for name in (
                *("engine/worker", "engine/run_ahead", "engine/catch_up", "engine/step_drafts"),
                *("requests/held_requests", "requests/launched_steps", "sampling/node_sampler"),
            )
        } <= files
    assert (True, 1) in kinds  # a step that ran ahead
    assert (False, WIDTHS[-1]) in kinds  # a planned step with drafts
