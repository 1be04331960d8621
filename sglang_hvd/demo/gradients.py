"""Gradients of several losses at once, one thread each.

At these sizes an operator is too small to be split between cores; whole micro-batches are not.
Each gradient is computed by a single thread and the sum has a fixed order, so that the result is
the same bytes on any number of cores.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn

NUM_WORKERS = 2


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """`NUM_WORKERS` threads in which torch uses one thread each; so does the caller meanwhile."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(
            NUM_WORKERS, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            yield pool
    finally:
        torch.set_num_threads(num_threads)


def set_gradients(
    pool: ThreadPoolExecutor,
    model: nn.Module,
    losses: Sequence[Callable[[], Tensor]],
    *,
    scale: float,
) -> None:
    """Puts the gradient of the sum of `losses`, times `scale`, into the parameters of `model`."""
    parameters = list(model.parameters())
    gradients = pool.map(lambda loss: torch.autograd.grad(loss(), parameters), losses)
    for parameter, parts in zip(parameters, zip(*gradients, strict=True), strict=True):
        parameter.grad = torch.stack(parts).sum(0) * scale
