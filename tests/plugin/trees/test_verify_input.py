"""What SGLang's verification is given."""

import pytest
import torch
from sgl_kernel.demands import demand
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

from sglang_hvd.plugin.trees.draft_trees import DraftNodes
from sglang_hvd.plugin.trees.verify_input import MaskPlace, build_verify_input


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_it_is_what_the_cuda_kernels_take(num_requests: int, width: int) -> None:
    # As they come from the host: token ids, parents and numbers of nodes side by side.
    rows = torch.zeros((num_requests, 2 * width + 1), dtype=torch.int64)
    rows[:, 0] = torch.arange(num_requests)
    rows[:, -1] = 1
    nodes = DraftNodes(rows[:, :width], rows[:, width : 2 * width], rows[:, 2 * width])
    found = build_verify_input(
        nodes,
        torch.full((num_requests,), 7),
        MaskPlace(TreeMaskMode.QLEN_ONLY, None),
        topk=4,
        num_cached=7 * num_requests,
    )
    demand(
        torch.int64,
        (num_requests, width),
        candidates=found.draft_token.reshape(num_requests, width),
        retrieve_index=found.retrieve_index,
        retrieve_next_token=found.retrieve_next_token,
        retrieve_next_sibling=found.retrieve_next_sibling,
    )
    demand(torch.int64, (num_requests * width,), positions=found.positions)
    assert found.draft_token.view(num_requests, width)[:, 0].tolist() == list(range(num_requests))
