"""Copies between the target's device and the host. Only HostCopy.wait waits for them.

Each copy has a fixed cost. So a decode step sends all that it needs in one copy, and all that it
gives back comes in one. Pinned memory is torch's, which keeps its blocks and uses them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch


class HostCopy:
    """Device tensors of one type on their way to the host, in one copy.

    On CUDA a side stream copies the tensors once they are computed, while later work of the step
    (draft-extend, scheduling) still runs. On a CPU there is nothing to copy.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        dtypes = {tensor.dtype for tensor in tensors}
        assert len(dtypes) == 1, f"one copy takes one type, not {dtypes}"
        if stream is None:
            self._host = list(tensors)
            self._done = None
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            flat = [tensor.reshape(-1) for tensor in tensors]
            packed = torch.cat(flat) if len(flat) > 1 else flat[0]
            host = torch.empty_like(packed, device="cpu", pin_memory=True)
            host.copy_(packed, non_blocking=True)
            self._host = _parts(host, [tensor.shape for tensor in tensors])
            self._done = torch.cuda.Event()
            self._done.record(stream)
        for tensor in tensors:
            tensor.record_stream(stream)

    def wait(self) -> list[np.ndarray]:
        """The arrays on the host; blocks until the copy (not the rest of the step) is done."""
        if self._done is not None:
            self._done.synchronize()
        return [tensor.numpy() for tensor in self._host]


def copy_stream(device: str) -> torch.cuda.Stream | None:
    """The side stream for `HostCopy`, None where the device is the host."""
    # The copy's kernel should not wait for draft-extend, which is launched next.
    return torch.cuda.Stream(priority=-1) if device == "cuda" else None


def to_device(array: np.ndarray, device: str) -> torch.Tensor:
    """Sends an array without waiting for the device."""
    tensor = torch.from_numpy(array)
    if device == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


Arrays: TypeAlias = Mapping[str, npt.NDArray[np.int64]]


def all_to_device(arrays: Arrays, device: str) -> dict[str, torch.Tensor]:
    """Sends arrays in one copy, without waiting for the device. The tensors share memory. On a CPU
    they are the arrays themselves."""
    assert all(array.dtype == np.int64 for array in arrays.values()), "one copy takes one type"
    if device == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    return _unpacked(_packed(arrays, pin_memory=True).to(device, non_blocking=True), arrays)


def _packed(arrays: Arrays, *, pin_memory: bool) -> torch.Tensor:
    num = sum(array.size for array in arrays.values())
    packed = torch.empty(num, dtype=torch.int64, pin_memory=pin_memory and num > 0)
    if num:
        np.concatenate([array.reshape(-1) for array in arrays.values()], out=packed.numpy())
    return packed


def _unpacked(packed: torch.Tensor, arrays: Arrays) -> dict[str, torch.Tensor]:
    parts = _parts(packed, [array.shape for array in arrays.values()])
    return dict(zip(arrays, parts, strict=True))


def _parts(packed: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Views of the tensors of these shapes, which stand one after the other."""
    parts = packed.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
