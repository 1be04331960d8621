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

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo


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
    outputs: Sequence[array[int] | None],
    token_ids: torch.Tensor,
    parents: torch.Tensor,
    num_used: torch.Tensor,
) -> dict[int, str]:
    """Lets the custom logit processors of a batch change the logits of its nodes.

    Args:
        logits: float[n * w, v], written in place.
        outputs: the tokens of each output so far; None for requests without a processor.
        token_ids, parents, num_used: see DraftNodes.

    Returns:
        What the processor of a request raised, by its row. The logits of its nodes stay as they
        were.
    """
    w = token_ids.shape[1]
    rows = sorted(row for entry in info.custom_logit_processor.values() for row in entry.rows)
    at = to_device(np.array(rows, np.int64), str(token_ids.device))
    # One wait for the tokens of the model drafter, and only in steps with processors.
    nodes = torch.cat([token_ids[at], parents[at], num_used[at, None]], dim=1).cpu().numpy()
    views: dict[int, list[RequestAtNode]] = {}
    for row, of_row in zip(rows, nodes, strict=True):
        output_ids = outputs[row]
        assert output_ids is not None, "requests with a processor keep their output"
        num = int(of_row[-1])
        views[row] = _views(reqs[row], output_ids, of_row[:num], of_row[w : w + num])
    failed: dict[int, str] = {}
    for entry in info.custom_logit_processor.values():
        try:
            _call(entry, logits, info, entry.rows, views, w)
        except Exception:  # noqa: BLE001 - a client's code may raise anything; it is told below
            for row in entry.rows:
                try:
                    _call(entry, logits, info, [row], views, w)
                except Exception as error:  # noqa: BLE001
                    failed[row] = f"{type(error).__name__}: {error}".splitlines()[0]
    return failed


def _views(
    req: Req, output_ids: array[int], token_ids: npt.NDArray[Any], parents: npt.NDArray[Any]
) -> list[RequestAtNode]:
    """The request at each node. The root is the last token of the output."""
    texts = [output_ids[:]]
    for token_id, parent in zip(token_ids[1:].tolist(), parents[1:].tolist(), strict=True):
        texts.append(texts[parent] + array(output_ids.typecode, [token_id]))
    return [RequestAtNode(req, text) for text in texts]


def _call(
    entry: ProcessorEntry,
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    rows: Sequence[int],
    views: dict[int, list[RequestAtNode]],
    w: int,
) -> None:
    places = np.concatenate([row * w + np.arange(len(views[row])) for row in rows])
    index = to_device(places, str(logits.device))
    params = [_params_at(info.custom_params[row], view) for row in rows for view in views[row]]
    selected = logits.index_select(0, index)
    result = entry.processor(selected, params)
    if result.shape != selected.shape:
        raise ValueError(f"it returned logits of shape {tuple(result.shape)}")
    logits.index_copy_(0, index, result.to(logits.dtype))


def _params_at(params: dict[str, Any] | None, view: RequestAtNode) -> dict[str, Any] | None:
    return params if params is None or "__req__" not in params else {**params, "__req__": view}
