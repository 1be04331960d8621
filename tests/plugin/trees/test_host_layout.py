"""The layout of a step in one native call, against the merge and the layout one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

from sglang_hvd.plugin.trees import host_layout
from sglang_hvd.plugin.trees.draft_trees import DraftNodes, HostLayout
from sglang_hvd.plugin.trees.layout import lay_out, merge_eagle_trees
from sglang_hvd.types import DraftBatch, HostDrafts
from tests.plugin.trees.made_up_tries import Tree, eagle_trees_of, tries

MOST, WIDTH = 5, 12


def host_drafts(trees: list[Tree]) -> HostDrafts:
    """The arrays have columns that no draft uses, and are parts of larger ones."""
    shape = 2, len(trees), WIDTH
    token_ids, parents = np.zeros(shape, np.int32)
    for row, tree in enumerate(trees):
        for node, (parent, token) in enumerate(tree):
            parents[row, node], token_ids[row, node] = parent - 1, token
    longest = max(map(len, trees))
    return HostDrafts(
        token_ids[:, :longest],
        parents[:, :longest],
        np.array([len(tree) for tree in trees], np.int32),
        np.ones(len(trees), np.bool_),
        np.zeros((len(trees), 9), np.float32),
    )


def in_two_calls(
    drafts: HostDrafts,
    roots: torch.Tensor,
    seq_lens: torch.Tensor,
    of_model: list[Tree] | None,
    rows: torch.Tensor | None,
    mode: TreeMaskMode,
) -> HostLayout:
    n, longest = drafts.token_ids.shape
    nodes = DraftNodes(*(torch.zeros((n, WIDTH), dtype=torch.int64) for _ in range(2)), roots + 0)
    nodes.token_ids[:, 0] = roots
    nodes.token_ids[:, 1 : 1 + longest] = torch.from_numpy(drafts.token_ids.copy())
    nodes.parents[:, 1 : 1 + longest] = torch.from_numpy(drafts.parents + 1)
    nodes.num_used[:] = torch.from_numpy(1 + drafts.num_nodes)
    is_model_node = None
    if of_model is not None:
        is_model_node = merge_eagle_trees(nodes, eagle_trees_of(of_model), rows)
    num_cells = WIDTH * (int(seq_lens.sum()) + n * WIDTH)
    layout = lay_out(nodes, seq_lens, mode=mode, num_cells=num_cells, buffer=None)
    return HostLayout(nodes, layout, torch.arange(n * WIDTH).view(n, WIDTH), is_model_node)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(tries(MOST), tries(MOST), st.integers(0, 9)), min_size=1, max_size=4),
    st.sampled_from([TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY]),
    st.sampled_from(["none", "some", "all"]),
)
def test_one_call_gives_what_two_give(
    requests: list[tuple[Tree, Tree, int]], mode: TreeMaskMode, drafting: str
) -> None:
    n, is_full = len(requests), mode == TreeMaskMode.FULL_MASK
    drafts = host_drafts([of_host for of_host, _, _ in requests])
    seq_lens = torch.tensor([length for *_, length in requests])
    roots = torch.arange(50, 50 + n)
    rows = torch.arange(n)[::2].contiguous() if drafting == "some" else None
    of_model: list[Tree] | None = [of_model for _, of_model, _ in requests]
    if drafting == "some":
        of_model = of_model[::2]
    if drafting == "none":
        of_model = None
    wanted = in_two_calls(drafts, roots, seq_lens, of_model, rows, mode)
    found = host_layout.lay_out_drafts(
        drafts,
        roots,
        seq_lens,
        WIDTH,
        torch.zeros_like(wanted.layout.mask),
        is_full_mask=is_full,
        trees=None if of_model is None else eagle_trees_of(of_model),
        rows=rows,
    )
    assert found.nodes.num_used.tolist() == wanted.nodes.num_used.tolist()
    is_used = torch.arange(WIDTH) < wanted.nodes.num_used[:, None]
    assert torch.equal(found.nodes.token_ids, wanted.nodes.token_ids)
    assert torch.equal(found.nodes.parents[is_used], wanted.nodes.parents[is_used])
    assert torch.equal(found.slots, wanted.slots)
    for name in ("positions", "next_token", "next_sibling", "mask"):
        assert torch.equal(getattr(found.layout, name), getattr(wanted.layout, name)), name
    if of_model is not None:
        assert found.is_model_node is not None
        assert torch.equal(found.is_model_node, wanted.is_model_node)


def test_a_mask_that_is_too_small_is_refused() -> None:
    drafts = DraftBatch.of_size(2, 3).chains(np.array([1, 2], np.int32))
    lens = torch.tensor([4, 4])
    with pytest.raises(ValueError, match="the mask is too small"):
        host_layout.lay_out_drafts(
            drafts,
            lens,
            lens,
            4,
            torch.zeros(31, dtype=torch.bool),
            is_full_mask=False,
            trees=None,
            rows=None,
        )
