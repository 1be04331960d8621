"""Makes a server generate what a script says, whatever its weights are.

Two things are replaced: the target's logits, so that the recorded token has the greatest wherever
the text so far is the recorded one, and the model drafter's tree, so that as many of its tokens are
right as were drawn. Everything else runs as it does in service, both models' forwards included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.trace_serving.script import Script
from benchmarks.trace_serving.tree_shape import TreeShape
from sglang_hvd.types import DraftPlans

_LARGE = 1e30


class Dictation:
    """The hooks of one server process, as SGLang's registry calls them."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._num_ids = int(script.token_ids.max()) + 1
        self._on_device: dict[str, torch.Tensor] = {}
        self._num_nodes: list[int] = []
        self._shapes: dict[tuple[int, int, int], TreeShape] = {}

    def forward(
        self, forward: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kw: Any
    ) -> Any:
        """AROUND ModelRunner.forward."""
        output = forward(runner, forward_batch, *args, **kw)
        if runner.is_draft_worker or forward_batch.forward_mode.is_idle():
            return output
        logits = output.logits_output.next_token_logits
        # A batch that is timed before the server serves has no requests.
        starts = [self._script.start_of(rid) for rid in forward_batch.rids or ()]
        requests = [row for row, start in enumerate(starts) if start is not None]
        if logits is None or not requests:
            return output
        num_rows = len(logits) // len(starts)  # nodes of a verification; else one
        if forward_batch.forward_mode.is_target_verify() or forward_batch.forward_mode.is_decode():
            positions = forward_batch.positions[: len(logits)].view(-1, num_rows)
        else:  # of a prefill the last position alone has logits
            positions = forward_batch.seq_lens[: len(starts), None] - 1
        rows = _to(np.array(requests), logits.device)
        first = _to(np.array([starts[row] for row in requests]), logits.device)
        # A node whose parents are wrong gets a token of the text too; nothing asks for it.
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
        """AROUND build_eagle_verify_input, the end of SGLang's own draft."""
        num = draft_tokens.shape[1]
        shape = self._shape(kw["topk"], kw["num_steps"], num)
        tree = self._tree(batch, shape, [num] * len(batch.reqs), draft_tokens)
        return build(batch, draft_input, *tree, *args, **kw)

    def add_model_trees(
        self, run: Callable[..., Any], worker: Any, batch: Any, plans: DraftPlans, nodes: Any
    ) -> Any:
        """AROUND HvdDraftWorker._add_model_trees: the sizes of the trees that it wants."""
        self._num_nodes = [num for num in plans.num_model_nodes.tolist() if num]
        return run(worker, batch, plans, nodes)

    def run_model_drafter(
        self, run: Callable[..., Any], worker: Any, batch: Any, num_steps: int
    ) -> Any:
        """AROUND HvdDraftWorker._run_model_drafter."""
        (_, _, draft_tokens, _), kv_loc_plan = run(worker, batch, num_steps)
        shape = self._shape(worker.topk, num_steps, draft_tokens.shape[1])
        # In few steps a tree has fewer nodes than its size.
        sizes = [min(s for s in self._script.accepted if s >= num) for num in self._num_nodes]
        tree = self._tree(batch, shape, sizes, draft_tokens)
        ranks = _to(shape.ranks, draft_tokens.device).repeat(len(draft_tokens), 1)
        return (*tree, ranks), kv_loc_plan

    def _tree(
        self,
        batch: Any,
        shape: TreeShape,
        sizes: Sequence[int],
        draft_tokens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Parents, candidates and tokens as EAGLE's draft loop returns them, each in one piece: the
        kernel that lays trees out on a GPU takes no others."""
        device = draft_tokens.device
        starts = [self._script.start_of(req.rid) for req in batch.reqs]
        is_dictated = _to(np.array([start is not None for start in starts]), device)
        first = _to(np.array([start or 0 for start in starts]), device)
        # The token behind the root, which is the newest committed one.
        next_place = first + batch.seq_lens.to(torch.int64) + 1
        accepted = torch.zeros_like(next_place)
        for size in set(sizes):
            of_size = self._table(f"accepted {size}", self._script.accepted[size], device)
            is_of_size = _to(np.array(sizes) == size, device)
            drawn = of_size[next_place.clamp(max=len(of_size) - 1)].to(torch.int64)
            accepted = torch.where(is_of_size, drawn, accepted)
        depths, places = _to(shape.depths, device), _to(shape.siblings, device)
        right = self._text(next_place[:, None] + depths - 1)
        is_right = (places == 0) & (depths <= accepted[:, None])
        # Wrong tokens: none is the right one, and siblings differ.
        wrong = right + 1 + places
        wrong = torch.where(wrong < self._num_ids, wrong, wrong - self._num_ids)
        tokens = torch.where(is_right, right, wrong)
        tokens = torch.where(is_dictated[:, None], tokens, draft_tokens)
        num = len(starts)
        return (
            _to(shape.parent_list, device).repeat(num, 1),
            _to(shape.candidates, device).repeat(num, 1),
            tokens,
        )

    def _shape(self, topk: int, num_steps: int, num_nodes: int) -> TreeShape:
        key = topk, num_steps, num_nodes
        if key not in self._shapes:
            self._shapes[key] = TreeShape.of(topk, num_steps, num_nodes)
        return self._shapes[key]

    def _text(self, places: torch.Tensor) -> torch.Tensor:
        """Token ids at these places; at those behind the last text its last token."""
        token_ids = self._table("token_ids", self._script.token_ids, places.device)
        return token_ids[places.clamp(max=len(token_ids) - 1)].to(torch.int64)

    def _table(self, name: str, values: np.ndarray, device: torch.device) -> torch.Tensor:
        if name not in self._on_device:
            self._on_device[name] = _to(values, device)
        return self._on_device[name]


def _to(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)
