"""Copies between the target's device and the host that never wait for the step just launched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class HostCopy:
    """Device tensors on their way to the host.

    On CUDA the copy starts at once on a side stream, and ends while later work of the step
    (draft-extend, scheduling) still runs. On a CPU there is nothing to copy.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        if stream is None:
            self._host = list(tensors)
            self._done = None
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._host = [
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
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
    return torch.cuda.Stream() if device == "cuda" else None


def to_device(array: np.ndarray, device: str) -> torch.Tensor:
    """Sends an array without waiting for the device."""
    tensor = torch.from_numpy(array)
    if device == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
