"""A decode step waits for the device where it is written down, and nowhere else.

On a GPU each of these calls waits for the device if its tensor is there. So every function of the
engine that has such calls is listed with them, how many there are, and why they do not wait or may.
"""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
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
BY_PROCESSOR = "what a custom logit processor is given and gives, in steps with one"
BY_PENALTIES = "the penalties and the outputs, in steps with penalties"
THE_ONE = "the one wait of a step: the tokens of the step before it"

# The reason, and how often each call is in the function. A mask that has a name is not told apart
# from another index.
WRITTEN_DOWN: dict[str, tuple[str, dict[str, int]]] = {
    "device/host_transfer.py:HostCopy.wait": (THE_ONE, {"numpy": 1, "synchronize": 1}),
    "device/host_transfer.py:_packed": (ON_HOST, {"numpy": 1}),
    "device/flashinfer_plans.py:PlanFence.wait": (
        "FlashInfer's plan, whose buffer is used again",
        {"synchronize": 1},
    ),
    "device/flashinfer_plans.py:warm_up": (AT_START, {"tensor": 1}),
    "engine/catch_up.py:CatchUp._due": (IS_NUMPY, {"tolist": 1}),
    "engine/catch_up.py:CatchUp._extend": (ON_HOST, {"tensor": 1, "tolist": 1}),
    "engine/cost_profile.py:CostProfile._batch": (AT_START, {"cpu": 1}),
    "engine/cost_profile.py:CostProfile._ms": (AT_START, {"synchronize": 1}),
    "engine/cost_profile.py:CostProfile._verify": (AT_START, {"cpu": 1}),
    "engine/step_drafts.py:StepDrafts.draft": (IS_NUMPY, {"tolist": 1}),
    "engine/worker.py:HvdWorker._decode": (ON_HOST, {"tensor": 1, "equal": 1}),
    "engine/worker.py:_lengths_of": (ON_HOST, {"numpy": 1}),
    "requests/bad_requests.py:_as_number": (BY_REQUEST, {"item": 1}),
    "requests/launched_steps.py:LaunchedSteps._commit_prefill": (IS_NUMPY, {"tolist": 1}),
    "requests/launched_steps.py:LaunchedSteps._commit_cycles": (IS_NUMPY, {"tolist": 1}),
    "requests/launched_steps.py:LaunchedSteps._report": (IS_NUMPY, {"tolist": 1}),
    "sampling/processors.py:process_nodes": (BY_REQUEST, {"cpu": 1, "numpy": 1, "tolist": 1}),
    "sampling/processors.py:_views": (BY_REQUEST, {"tolist": 2}),
    "trees/host_layout.py:lay_out_drafts": (ON_HOST, {"numpy": 12}),
    "trees/host_layout.py:merge": (FOR_WIDE, {"cpu": 9}),
    "trees/host_layout.py:lay_out": (FOR_WIDE, {"cpu": 4}),
}

# Functions that copy between host and device, and how often.
_COPYING = {"to_device", "all_to_device", "HostCopy"}
COPIES: dict[str, tuple[str, dict[str, int]]] = {
    "engine/worker.py:HvdWorker._decode": (
        "the one copy to the device",
        {"all_to_device": 1},
    ),
    "requests/launched_steps.py:LaunchedSteps.record_verify": (
        "the one copy to the host",
        {"HostCopy": 1},
    ),
    "requests/launched_steps.py:LaunchedSteps.record_prefill": ("of a prefill", {"HostCopy": 1}),
    "sampling/node_sampler.py:NodeSampler.penalise_prefill": ("of a prefill", {"to_device": 1}),
    "sampling/node_sampler.py:NodeSampler.sample": (BY_PROCESSOR, {"to_device": 1}),
    "sampling/processors.py:process_nodes": (BY_PROCESSOR, {"to_device": 2}),
    "sampling/penalties.py:penalty_tensors": (BY_PENALTIES, {"to_device": 1}),
    "sampling/penalties.py:_OutputTokens.of": (BY_PENALTIES, {"to_device": 1}),
    "sampling/penalties.py:_forbid_ends": (BY_PENALTIES, {"to_device": 1}),
}


def functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def waits(function: ast.AST) -> Counter[str]:
    """The calls that may wait, and how many of each."""
    found: Counter[str] = Counter()
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Compare):
            found["mask"] += 1  # x[y > 0] needs the number of values that are true
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of, name = node.func.value, node.func.attr
        is_torch = isinstance(of, ast.Name) and of.id == "torch"
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        is_to_host = name == "to" and any(
            isinstance(value, ast.Constant) and value.value == "cpu" for value in given
        )
        is_nonzero = is_torch and name == "where" and len(given) == 1
        if name in _WAITING or (is_torch and name in _MAKING) or is_to_host or is_nonzero:
            found[name] += 1
    return found


def copies(function: ast.AST) -> Counter[str]:
    """The calls that copy between host and device, and how many of each."""
    return Counter(
        node.func.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _COPYING
    )


def found(calls_of: Callable[[ast.AST], Counter[str]]) -> dict[str, Counter[str]]:
    return {
        f"{path.relative_to(PLUGIN)}:{name}": calls
        for room in ROOMS
        for path in (PLUGIN / room).rglob("*.py")
        for name, function in functions(ast.parse(path.read_text()).body)
        if (calls := calls_of(function))
    }


def test_each_call_that_may_wait_is_written_down() -> None:
    assert found(waits) == {name: Counter(calls) for name, (_, calls) in WRITTEN_DOWN.items()}


def test_a_step_has_one_copy_each_way_but_for_what_requests_ask() -> None:
    assert found(copies) == {name: Counter(calls) for name, (_, calls) in COPIES.items()}


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("x.item()", "item"),
        ("torch.tensor([1], device=d)", "tensor"),
        ("y = x[0].tolist()", "tolist"),
        ("x.cpu()", "cpu"),
        ("x.numpy()", "numpy"),
        ("x.nonzero()", "nonzero"),
        ("torch.nonzero(x)", "nonzero"),
        ("x.to('cpu')", "to"),
        ("x.to(device='cpu')", "to"),
        ("torch.where(x)", "where"),
        ("x[x > 0]", "mask"),
    ],
)
def test_a_call_that_waits_is_found(line: str, call: str) -> None:
    assert waits(ast.parse(line)) == {call: 1}
    assert waits(ast.parse(f"{line}\n{line}")) == {call: 2}


@pytest.mark.parametrize("line", ["torch.where(m, x, y)", "x.to(device)", "x[0]", "x[a:b]"])
def test_a_call_that_does_not_wait_is_none(line: str) -> None:
    assert not waits(ast.parse(line))


def test_counting_what_the_model_drafter_had_right_does_not_read_the_device() -> None:
    """A tensor without values cannot be read, and so neither can a mask of it be indexed with."""
    index = torch.empty((3, 4), dtype=torch.int32, device="meta")
    is_model_node = torch.empty((3, 4), dtype=torch.bool, device="meta")
    assert num_accepted_of_model(index, is_model_node).shape == (3,)
