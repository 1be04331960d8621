"""Trees that SGLang's CUDA kernel refuses are refused on a CPU."""

import pytest
import sgl_kernel
import torch


def build(parents: torch.Tensor, candidates: torch.Tensor) -> None:
    """Two requests, three levels of two candidates, four nodes."""
    sgl_kernel.build_tree_kernel_efficient_cpu(
        parents,
        candidates,
        torch.tensor([3, 5]),
        torch.zeros(100, dtype=torch.bool),
        torch.zeros(8, dtype=torch.int64),
        *(torch.full((2, 4), -1) for _ in range(3)),
        topk=2,
        depth=3,
        draft_token_num=4,
        tree_mask_mode=0,
    )


PARENTS, CANDIDATES = torch.tensor([-1, 0, 1, 2, 3]).repeat(2, 1), torch.tensor([0, 1, 2])


def test_rows_of_their_own_are_taken() -> None:
    build(PARENTS, CANDIDATES.repeat(2, 1))


@pytest.mark.parametrize(
    ("parents", "candidates"),
    [
        (PARENTS[:1].expand(2, -1), CANDIDATES.repeat(2, 1)),
        (PARENTS, CANDIDATES.expand(2, -1)),
        (PARENTS.int(), CANDIDATES.repeat(2, 1)),
        (PARENTS[:, :4].contiguous(), CANDIDATES.repeat(2, 1)),
    ],
    ids=["shared parents", "shared candidates", "int32", "a parent missing"],
)
def test_what_the_kernel_refuses_is_refused(
    parents: torch.Tensor, candidates: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=r"the CUDA kernel takes torch\.int64 of"):
        build(parents, candidates)
