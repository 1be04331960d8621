"""What SGLang's CUDA kernels demand of their tensors. An operator on a CPU would take more, and
what only a GPU refuses would be found on a GPU only."""

import torch
from torch import Tensor


def demand(dtype: torch.dtype, shape: tuple[int, ...], **tensors: Tensor) -> None:
    """Raises ValueError, which names it, for a tensor of another type or shape, or not in one
    piece.

    Source: the TensorMatchers of sglang/kernels/jit/csrc/speculative/tree.cuh and sampling.cuh.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: the CUDA kernel takes {dtype} of {list(shape)} in one piece, this is "
                f"{tensor.dtype} of {list(tensor.shape)} with strides {list(tensor.stride())}"
            )
