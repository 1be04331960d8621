"""A decode step waits for the device where it is written down, and nowhere else.

On a GPU each of these calls waits for the device if its tensor is there. So every function of the
engine that has such a call is listed, with the reason why it does not wait, or why it may.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_hvd.plugin.trees.verify_input import num_accepted_of_model

PLUGIN = Path(__file__).parents[2] / "sglang_hvd" / "plugin"
ROOMS = ("engine", "requests", "sampling", "trees", "device")

# Methods of a tensor or an event that wait for the device. Those of numpy have the same names.
_WAITING = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize", "is_nonzero", "equal"}
# They copy a list to a device from memory that is not pinned, for which the host waits.
_MAKING = {"tensor", "as_tensor"}

IS_NUMPY = "arrays of numpy"
ON_HOST = "tensors that SGLang or HVD keeps on the host"
AT_START = "before the server serves"
BY_REQUEST = "of a request that asks for it, when it starts or ends, or in its own logit processor"
FOR_WIDE = "trees of more nodes than the kernels hold, as host_layout.py says"
THE_ONE = "the one wait of a step: the tokens of the step before it"

WRITTEN_DOWN = {
    "device/host_transfer.py:HostCopy.wait": THE_ONE,
    "device/flashinfer_plans.py:PlanFence.wait": "FlashInfer's plan, whose buffer is used again",
    "device/flashinfer_plans.py:warm_up": AT_START,
    "engine/catch_up.py:CatchUp.due_rows": IS_NUMPY,
    "engine/catch_up.py:CatchUp._extend": ON_HOST,
    "engine/cost_profile.py:CostProfile._batch": AT_START,
    "engine/cost_profile.py:CostProfile._ms": AT_START,
    "engine/cost_profile.py:CostProfile._verify": AT_START,
    "engine/step_drafts.py:StepDrafts.draft": IS_NUMPY,
    "engine/worker.py:HvdWorker._decode": ON_HOST,
    "engine/worker.py:_lengths_of": ON_HOST,
    "requests/bad_requests.py:_as_number": BY_REQUEST,
    "requests/launched_steps.py:LaunchedSteps._commit_prefill": IS_NUMPY,
    "requests/launched_steps.py:LaunchedSteps._commit_cycles": IS_NUMPY,
    "requests/launched_steps.py:LaunchedSteps._report": IS_NUMPY,
    "requests/served_figures.py:_by_label": IS_NUMPY,
    "sampling/processors.py:process_nodes": BY_REQUEST,
    "sampling/processors.py:_views": BY_REQUEST,
    "trees/host_layout.py:lay_out_drafts": ON_HOST,
    "trees/host_layout.py:merge": FOR_WIDE,
    "trees/host_layout.py:lay_out": FOR_WIDE,
}


def functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def waits(function: ast.AST) -> bool:
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of = node.func.value
        is_made = isinstance(of, ast.Name) and of.id == "torch" and node.func.attr in _MAKING
        if is_made or node.func.attr in _WAITING:
            return True
    return False


def found() -> set[str]:
    return {
        f"{path.relative_to(PLUGIN)}:{name}"
        for room in ROOMS
        for path in (PLUGIN / room).rglob("*.py")
        for name, function in functions(ast.parse(path.read_text()).body)
        if waits(function)
    }


def test_each_call_that_may_wait_is_written_down() -> None:
    assert found() - WRITTEN_DOWN.keys() == set()


def test_what_is_written_down_is_there() -> None:
    assert WRITTEN_DOWN.keys() - found() == set()


@pytest.mark.parametrize(
    "line", ["x.item()", "torch.tensor([1], device=d)", "y = x[0].tolist()", "x.cpu()"]
)
def test_a_call_that_waits_is_found(line: str) -> None:
    assert waits(ast.parse(line))


def test_counting_what_the_model_drafter_had_right_does_not_read_the_device() -> None:
    """A tensor without values cannot be read, and so neither can a mask of it be indexed with."""
    index = torch.empty((3, 4), dtype=torch.int32, device="meta")
    is_model_node = torch.empty((3, 4), dtype=torch.bool, device="meta")
    assert num_accepted_of_model(index, is_model_node).shape == (3,)
