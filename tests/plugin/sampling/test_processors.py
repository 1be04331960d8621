"""Custom logit processors see each node as plain serving shows them a request."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry

from sglang_hvd.plugin.sampling.processors import process_nodes
from sglang_hvd.plugin.trees.draft_trees import DraftNodes

VOCAB_SIZE = 5


class ForbidLast:
    """Forbids the last token of the output, and notes what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[int]]] = []

    def __call__(self, logits: torch.Tensor, params: list[Any]) -> torch.Tensor:
        for row, each in enumerate(params):
            req = each["__req__"]
            self.seen.append((req.rid, req.output_ids.tolist()))
            if each.get("raises"):
                raise RuntimeError("a client's mistake\nin two lines")
            logits[row, req.output_ids[-1]] = float("-inf")
        return logits


def processed(
    processor: Any,
    params: list[dict[str, Any] | None],
    rows: list[int],
    *,
    failed_slots: tuple[int, ...] = (),
) -> tuple[torch.Tensor, dict[int, str]]:
    """Two requests with three slots each; the second uses two of them.

    failed_slots: those at which the processor is expected to fail.
    """
    reqs: Any = [
        SimpleNamespace(rid=rid, to_finish=None, finished=lambda: False) for rid in ("a", "b")
    ]
    given = [
        None if p is None else {**p, "__req__": req} for p, req in zip(params, reqs, strict=True)
    ]
    entry = ProcessorEntry(processor, rows, torch.tensor(rows))
    info: Any = SimpleNamespace(custom_logit_processor={1: entry}, custom_params=given)
    logits = torch.zeros(6, VOCAB_SIZE)
    nodes = DraftNodes(
        token_ids=torch.tensor([[1, 2, 3], [2, 4, 0]]),
        parents=torch.tensor([[0, 0, 0], [0, 0, 0]]),
        num_used=torch.tensor([3, 2]),
    )
    held: list[Any] = [SimpleNamespace(output_ids=array("q", ids)) for ids in ([0, 1], [2])]
    failed = process_nodes(logits, info, reqs, held, nodes)
    assert failed == list(failed_slots)
    return logits, {
        row: str(req.to_finish.message) for row, req in enumerate(reqs) if req.to_finish
    }


def test_each_node_is_a_request_whose_output_ends_there() -> None:
    processor = ForbidLast()
    logits, failed = processed(processor, [{}, {}], [0, 1])
    assert not failed
    assert processor.seen == [
        *(("a", [0, 1]), ("a", [0, 1, 2]), ("a", [0, 1, 3])),
        *(("b", [2]), ("b", [2, 4])),
    ]
    forbidden = [row.isinf().nonzero().flatten().tolist() for row in logits]
    assert forbidden == [[1], [2], [3], [2], [4], []]


@pytest.mark.parametrize("raising", [0, 1])
def test_a_processor_that_raises_fails_for_its_own_request(raising: int) -> None:
    params: list[dict[str, Any] | None] = [{}, {}]
    params[raising] = {"raises": True}
    slots = ((0, 1, 2), (3, 4))[raising]
    logits, failed = processed(ForbidLast(), params, [0, 1], failed_slots=slots)
    assert failed == {raising: "custom_logit_processor failed: RuntimeError: a client's mistake"}
    own, other = logits.view(2, 3, -1)[raising], logits.view(2, 3, -1)[1 - raising]
    assert not own.isinf().any()
    assert other.isinf().any()


def test_logits_of_another_shape_are_an_error() -> None:
    _, failed = processed(lambda logits, params: logits[:, :2], [{}, {}], [1], failed_slots=(3, 4))
    assert "it returned [1, 2] for logits of shape [1, 5]" in failed[1]


def test_a_processor_for_one_row_is_called_for_each_row() -> None:
    logits, failed = processed(lambda logits, params: logits[:1] + 1, [{}, {}], [1])
    assert not failed
    assert logits[:, 0].tolist() == [0, 0, 0, 1, 1, 0]


def test_a_processor_that_raises_at_a_draft_fails_there_alone() -> None:
    def process(logits: torch.Tensor, params: list[Any]) -> torch.Tensor:
        assert all(each["__req__"].output_ids.tolist() != [0, 1, 2] for each in params)
        return logits + 1

    logits, failed = processed(process, [{}, {}], [0, 1], failed_slots=(1,))
    assert not failed
    assert logits[:, 0].tolist() == [1, 0, 1, 1, 1, 0]
