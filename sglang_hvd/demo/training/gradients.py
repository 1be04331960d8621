"""Computes the gradients of several losses at the same time, one thread each.

At the demo's sizes an operator is too small to be split between cores, but a micro-batch is not.
A single thread computes each gradient and the sum has a fixed order, so the result is the same
bytes on any number of cores.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn

NUM_WORKERS = 2


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """A pool of `NUM_WORKERS` threads. Meanwhile torch uses one thread in each of them, and in the
    caller."""
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
