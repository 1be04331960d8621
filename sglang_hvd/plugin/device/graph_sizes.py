"""The batch sizes of the graphs that are captured in addition to SGLang's own.

Each captured batch size takes memory: with FlashInfer 8 MB on the device, and as much pinned memory
on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
from sglang.srt.runtime_context import get_exec

from sglang_hvd.allocation import MAX_WIDE_REQUESTS, VerifyWidths

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

# Where sizes are thinned, no batch is padded to more than this times its size.
_MAX_PADDING = 1.25


def sizes_of_width(runner: ModelRunner, widths: VerifyWidths, width: int) -> list[int]:
    """Batch sizes of a width's graphs, rising. The base has SGLang's own, and a narrow width fewer
    of them. A wide width has the smallest ones up to the requests that may verify it.

    runner: of the target.
    """
    if width > widths.base:
        # Aligned as those of draft-extend, which is stricter than the target's alignment.
        sizes, _ = get_batch_sizes_to_capture(runner)
        num_fewer = sum(size < MAX_WIDE_REQUESTS for size in sizes)
        return sizes[: num_fewer + 1]
    gathers = any(runner.decode_graph_gather_requirements())
    sizes, _ = get_batch_sizes_to_capture(runner, width, gathered_buffer_required=gathers)
    return sizes if width == widths.base or needs_all_sizes(runner) else thinned(sizes)


def sizes_of_few_steps(runner: ModelRunner) -> list[int]:
    """Batch sizes of the graphs of drafts with fewer steps than SGLang's own, rising.

    runner: of the draft model.
    """
    sizes, _ = get_batch_sizes_to_capture(runner)
    return sizes if needs_all_sizes(runner) else thinned(sizes)


def thinned(sizes: Sequence[int]) -> list[int]:
    """Thins batch sizes from the largest down, so that no batch is padded to more than _MAX_PADDING
    times its size. All sizes stay that are further apart than that."""
    kept = [sizes[-1]]
    for below, size in reversed(list(zip([0, *sizes], sizes[:-1], strict=False))):
        if kept[-1] > _MAX_PADDING * (below + 1):
            kept.append(size)
    return kept[::-1]


def needs_all_sizes(runner: ModelRunner) -> bool:
    """Whether batch sizes must be aligned, or batches are not padded."""
    is_exact = get_exec().graph.disable_cuda_graph_padding
    return is_exact or any(runner.decode_graph_gather_requirements())


@contextmanager
def capturing(sizes: list[int]) -> Iterator[None]:
    """SGLang's graph runners capture these batch sizes inside."""
    decode = get_exec().graph.cuda_graph_config.decode
    all_sizes = decode.bs
    decode.bs = sizes
    try:
        yield
    finally:
        decode.bs = all_sizes
