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


def demand_verified(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
) -> None:
    """Raises ValueError for tensors that neither verification on CUDA takes, greedy or sampled;
    they are those of `sgl_kernel.tree.verify_tree_greedy_cpu`."""
    batch, width = candidates.shape
    demand(
        torch.int64,
        (batch, width),
        candidates=candidates,
        retrive_index=retrive_index,
        retrive_next_token=retrive_next_token,
        retrive_next_sibling=retrive_next_sibling,
    )
    demand(torch.int32, (batch, accept_index.shape[1]), accept_index=accept_index)
    demand(torch.int32, (batch,), accept_token_num=accept_token_num)
    demand(torch.int32, (batch * width,), predicts=predicts)
