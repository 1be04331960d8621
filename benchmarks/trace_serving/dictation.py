"""Makes a server generate what a script says, whatever its weights are.

Two things are replaced. In the target's logits the recorded token gets the largest value, as long
as the text so far is the recorded one. In the model drafter's tree as many tokens are right as were
drawn. Everything else runs as in service, both models' forward passes included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.trace_serving.script import Script
from benchmarks.trace_serving.tree_shape import TreeShape
from sglang_hvd.plugin.requests.step_plan import StepPlan

_LARGE = 1e30


class Dictation:
    """The hooks of one server process. SGLang's registry calls them."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._num_ids = int(script.token_ids.max()) + 1
        self._on_device: dict[str, torch.Tensor] = {}
        self._num_nodes: list[int] = []
        self._shapes: dict[tuple[int, int, int], _DeviceShape] = {}

    def forward(
        self, forward: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kw: Any
    ) -> Any:
        """AROUND ModelRunner.forward."""
        output = forward(runner, forward_batch, *args, **kw)
        if runner.is_draft_worker or forward_batch.forward_mode.is_idle():
            return output
        logits = output.logits_output.next_token_logits
        # A batch that is timed before the server serves has no request ids.
        starts = [self._script.start_of(rid) for rid in forward_batch.rids or ()]
        requests = [row for row, start in enumerate(starts) if start is not None]
        if logits is None or not requests:
            return output
        num_rows = len(logits) // len(starts)  # nodes of a verification, else 1
        if forward_batch.forward_mode.is_target_verify() or forward_batch.forward_mode.is_decode():
            positions = forward_batch.positions[: len(logits)].view(-1, num_rows)
        else:  # in a prefill only the last position has logits
            positions = forward_batch.seq_lens[: len(starts), None] - 1
        known = [start for start in starts if start is not None]
        rows, first = _to(np.array([requests, known]), logits.device)
        # A node with wrong parents gets a token of the text too, but nothing reads it.
        wanted = self._text(first[:, None] + positions[rows] + 1)
        slots = rows[:, None] * num_rows + torch.arange(num_rows, device=logits.device)
        logits[slots.view(-1), wanted.view(-1)] = _LARGE
        return output

    def build_eagle_verify_input(
        self,
        build: Callable[..., Any],
        batch: Any,
        draft_input: Any,
        parent_list: torch.Tensor,
        top_scores_index: torch.Tensor,
        draft_tokens: torch.Tensor,
        *args: Any,
        **kw: Any,
    ) -> Any:
        """AROUND build_eagle_verify_input, which ends SGLang's own draft."""
        num = draft_tokens.shape[1]
        shape = self._shape(kw["topk"], kw["num_steps"], num, draft_tokens.device)
        tree = self._tree(batch, shape, [num] * len(batch.reqs), draft_tokens)
        return build(batch, draft_input, *tree, *args, **kw)

    def draft(
        self, draft: Callable[..., Any], step_drafts: Any, batch: Any, plan: StepPlan, sent: Any
    ) -> Any:
        """AROUND StepDrafts.draft. Notes the sizes of the trees that the plan asks for."""
        self._num_nodes = [num for num in plan.drafts.num_model_nodes.tolist() if num]
        return draft(step_drafts, batch, plan, sent)

    def run_model_drafter(
        self, run: Callable[..., Any], step_drafts: Any, batch: Any, num_steps: int, width: int
    ) -> Any:
        """AROUND StepDrafts._run_model_drafter."""
        (_, _, draft_tokens, _), kv_loc_plan = run(step_drafts, batch, num_steps, width)
        shape = self._shape(step_drafts.topk, num_steps, draft_tokens.shape[1], draft_tokens.device)
        # With few steps a tree has fewer nodes than its size says.
        sizes = [min(s for s in self._script.accepted if s >= num) for num in self._num_nodes]
        tree = self._tree(batch, shape, sizes, draft_tokens)
        ranks = shape.ranks.repeat(len(draft_tokens), 1)
        return (*tree, ranks), kv_loc_plan

    def _tree(
        self,
        batch: Any,
        shape: _DeviceShape,
        sizes: Sequence[int],
        draft_tokens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Parents, candidates and tokens as EAGLE's draft loop returns them. They are contiguous,
        which the GPU kernel that lays trees out requires."""
        device = draft_tokens.device
        known = [self._script.start_of(req.rid) for req in batch.reqs]
        starts = [-1 if start is None else start for start in known]
        first, of_size = _to(np.array([starts, sizes]), device)
        # Place of the token after the root, which is the newest committed token.
        next_place = first.clamp(min=0) + batch.seq_lens.to(torch.int64) + 1
        accepted = torch.zeros_like(next_place)
        for size in set(sizes):
            drawn = self._table(f"accepted {size}", self._script.accepted[size], device)
            here = drawn[next_place.clamp(max=len(drawn) - 1)].to(torch.int64)
            accepted = torch.where(of_size == size, here, accepted)
        right = self._text(next_place[:, None] + shape.depths - 1)
        is_right = shape.is_chain & (shape.depths <= accepted[:, None])
        # A wrong token differs from the right one and from its siblings.
        wrong = right + 1 + shape.siblings
        wrong = torch.where(wrong < self._num_ids, wrong, wrong - self._num_ids)
        tokens = torch.where(is_right, right, wrong)
        tokens = torch.where(first[:, None] >= 0, tokens, draft_tokens)
        num = len(starts)
        return shape.parent_list.repeat(num, 1), shape.candidates.repeat(num, 1), tokens

    def _shape(
        self, topk: int, num_steps: int, num_nodes: int, device: torch.device
    ) -> _DeviceShape:
        key = topk, num_steps, num_nodes
        if key not in self._shapes:
            self._shapes[key] = _DeviceShape.of(TreeShape.of(*key), device)
        return self._shapes[key]

    def _text(self, places: torch.Tensor) -> torch.Tensor:
        """Token ids at these places. Places after the last text give its last token."""
        token_ids = self._table("token_ids", self._script.token_ids, places.device)
        return token_ids[places.clamp(max=len(token_ids) - 1)].to(torch.int64)

    def _table(self, name: str, values: np.ndarray, device: torch.device) -> torch.Tensor:
        if name not in self._on_device:
            self._on_device[name] = _to(values, device)
        return self._on_device[name]


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceShape:
    """A TreeShape on the model's device."""

    parent_list: torch.Tensor
    candidates: torch.Tensor
    depths: torch.Tensor
    siblings: torch.Tensor
    is_chain: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def of(cls, shape: TreeShape, device: torch.device) -> _DeviceShape:
        of_shape = (shape.parent_list, shape.candidates, shape.depths, shape.siblings)
        is_chain = shape.siblings == 0
        return cls(*(_to(values, device) for values in (*of_shape, is_chain, shape.ranks)))


def _to(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        # Copies from unpinned memory would make the host wait for all work launched before.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
