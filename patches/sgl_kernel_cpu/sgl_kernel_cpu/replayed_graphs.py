"""CUDA graphs without CUDA: SGLang's graph runners with what they capture run again at each replay.

Only tests use it, in Triton's interpreter, to see that captured steps read and write the right
buffers: batches are padded to the captured sizes, inputs are copied into static buffers, outputs
are where the capture left them, and metadata is planned outside. A capture refuses what waits for
the device; here that is the reading of single values and what has as many values as it finds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
    EAGLEDraftExtendCudaGraphRunner,
)
from torch.utils._python_dispatch import TorchDispatchMode


def install() -> None:
    """Register every hook."""
    for target, hook in TARGETS.items():
        HookRegistry.register(target, hook, HookType.REPLACE)


class ReplayedGraphs(BaseCudaGraphBackend):
    """FullCudaGraphBackend whose graphs are functions, run with the metadata they were captured
    with."""

    def __init__(self, cuda_graph_runner: Any) -> None:
        backend = cuda_graph_runner.attn_backend
        self._attn_backends = getattr(backend, "attn_backends", [backend])
        self._captured: dict[Any, _Graph] = {}

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        for _ in range(2):
            forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        with _NoHostReads():
            outputs = forward_fn()
        self._captured[shape_key] = _Graph(forward_fn, outputs, self._metadata())

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._captured

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **_: Any) -> Any:
        graph, planned = self._captured[shape_key], self._metadata()
        self._use_metadata(graph.metadata)
        _copy(graph.forward_fn(), graph.outputs)
        self._use_metadata(planned)
        return graph.outputs

    def cleanup(self) -> None:
        self._captured.clear()

    def _metadata(self) -> list[Any]:
        return [backend.forward_metadata for backend in self._attn_backends]

    def _use_metadata(self, metadata: list[Any]) -> None:
        for backend, of_backend in zip(self._attn_backends, metadata, strict=True):
            backend.forward_metadata = of_backend


class _Graph(NamedTuple):
    forward_fn: Callable[[], Any]
    outputs: Any
    metadata: list[Any]


class _NoHostReads(TorchDispatchMode):
    """Refuses some of what would wait for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_masked = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if is_masked or func in _HOST_READS:
            raise RuntimeError(f"{func} while a graph is captured")
        return func(*args, **(kwargs or {}))


_HOST_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


def _copy(new: Any, old: Any) -> None:
    """The tensors of one output into those of another, which has the same fields."""
    if isinstance(new, torch.Tensor):
        if new is not old:
            old.copy_(new)
    elif isinstance(new, (tuple, list)):
        for a, b in zip(new, old, strict=True):
            _copy(a, b)
    elif hasattr(new, "__dict__"):
        for name, value in vars(new).items():
            _copy(value, getattr(old, name))


def _graphs_of(cuda_graph_runner: Any) -> ReplayedGraphs:
    return ReplayedGraphs(cuda_graph_runner)


def _capture_decode_graph(*, model_runner: Any) -> GraphCapture:
    return GraphCapture(
        runner=DecodeCudaGraphRunner(model_runner),
        memory_phase="target_verify",
        memory_usage_gb=0,
        capture_time=0,
    )


def _capture_cuda_graphs(worker: Any) -> None:
    worker.cuda_graph_runner = worker.cuda_graph_runner_for_draft_extend = None
    if worker.speculative_num_steps > 1:
        worker.cuda_graph_runner = EAGLEDraftCudaGraphRunner(worker)
    if worker.draft_extend_attn_backend is not None:
        worker.cuda_graph_runner_for_draft_extend = EAGLEDraftExtendCudaGraphRunner(worker)


def _record_nothing(cuda_graph_runner: Any) -> None:
    """There is one stream, so no event has to order reads of the metadata after its writes."""


_EXECUTOR = "sglang.srt.model_executor"

TARGETS: dict[str, Callable[..., Any]] = {
    f"{_EXECUTOR}.model_runner_components.cuda_graph_setup.capture_decode_graph": (
        _capture_decode_graph
    ),
    "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs": (
        _capture_cuda_graphs
    ),
    f"{_EXECUTOR}.runner_backend.utils.resolve_decode_backend": _graphs_of,
    f"{_EXECUTOR}.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
    "._record_in_graph_metadata_prep_done": _record_nothing,
}
