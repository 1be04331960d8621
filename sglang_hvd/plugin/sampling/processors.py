"""Calls SGLang's custom logit processors for each node, with a view of the request whose output
ends at the node."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_hvd.plugin.device.host_transfer import to_device
from sglang_hvd.plugin.requests.bad_requests import apply_processor
from sglang_hvd.plugin.requests.held_requests import HeldRequest
from sglang_hvd.plugin.trees.draft_trees import DraftNodes

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class RequestAtNode:
    """A request as a custom logit processor sees it at a node: `output_ids` are the tokens before
    the one that is sampled, all else is the request's. What a processor sets on it is gone after
    the call, since another path may be accepted.
    """

    def __init__(self, req: Req, output_ids: array[int]) -> None:
        self._req, self.output_ids = req, output_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


def process_nodes(
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    reqs: Sequence[Req],
    held: Sequence[HeldRequest],
    nodes: DraftNodes,
) -> list[int]:
    """Lets the custom logit processors of a batch change the logits of its nodes. One that fails at
    a root ends its request.

    Args:
        logits: float[n * w, v], written in place.
        held: the requests; those with a processor keep their output so far.

    Returns:
        The slots at which a processor failed. Such a draft token must not be accepted: if it is
        sampled, it is the root of the next step.
    """
    w, entries = nodes.token_ids.shape[1], info.custom_logit_processor.values()
    rows = sorted(row for entry in entries for row in entry.rows)
    at = to_device(np.array(rows, np.int64), str(logits.device))
    # One wait for the tokens of the model drafter, and only in steps with processors.
    columns = [nodes.token_ids[at], nodes.parents[at], nodes.num_used[at, None]]
    views: dict[int, list[RequestAtNode]] = {}
    for row, of_row in zip(rows, torch.cat(columns, dim=1).cpu().numpy(), strict=True):
        output_ids = held[row].output_ids
        assert output_ids is not None, "requests with a processor keep their output"
        num = int(of_row[-1])
        views[row] = _views(reqs[row], output_ids, of_row[:num], of_row[w : w + num])
    failed: list[int] = []
    for entry in entries:
        slots = np.concatenate([row * w + np.arange(len(views[row])) for row in entry.rows])
        index = to_device(slots, str(logits.device))
        seen = [(row, view) for row in entry.rows for view in views[row]]
        params = [_params_at(info.custom_params[row], view) for row, view in seen]
        owners = [reqs[row] for row, _ in seen]
        selected = logits.index_select(0, index)
        found, rows_failed = apply_processor(entry.processor, selected, params, owners)
        logits.index_copy_(0, index, found)
        failed += slots[rows_failed].tolist()
    return failed


def _views(
    req: Req, output_ids: array[int], token_ids: npt.NDArray[Any], parents: npt.NDArray[Any]
) -> list[RequestAtNode]:
    """The request at each node. The root is the last token of the output."""
    texts = [output_ids[:]]
    for token_id, parent in zip(token_ids[1:].tolist(), parents[1:].tolist(), strict=True):
        texts.append(texts[parent] + array(output_ids.typecode, [token_id]))
    return [RequestAtNode(req, text) for text in texts]


def _params_at(params: dict[str, Any] | None, view: RequestAtNode) -> dict[str, Any] | None:
    return params if params is None or "__req__" not in params else {**params, "__req__": view}
