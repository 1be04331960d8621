"""The kernels of the verify tree beside the native core, which says the same. To be run in
Triton's interpreter, which test_layout_kernels.py does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

from sglang_hvd.plugin.trees import host_layout, layout, layout_kernels
from sglang_hvd.plugin.trees.draft_trees import DraftNodes, EagleTrees, VerifyLayout
from sglang_hvd.plugin.trees.layout import lay_out, merge_eagle_trees, warm_up
from sglang_hvd.plugin.trees.layout_kernels import has_kernels
from tests.plugin.trees.made_up_tries import Tree, tries


def _nodes(rows: list[Tree], width: int, stride: int) -> DraftNodes:
    """Rows list parent and token of nodes 1, 2, ...; as the one transfer brings them, columns
    of a wider array."""
    packed = torch.full((len(rows), 2 * stride + 1), 5)
    token_ids, parents = packed[:, :width], packed[:, stride : stride + width]
    parents[:] = torch.arange(-1, width - 1)
    for row, nodes in enumerate(rows):
        for node, (parent, token) in enumerate(nodes):
            parents[row, 1 + node], token_ids[row, 1 + node] = parent, token
    packed[:, 2 * stride] = torch.tensor([1 + len(nodes) for nodes in rows])
    return DraftNodes(token_ids, parents, packed[:, 2 * stride])


def _copied(nodes: DraftNodes) -> DraftNodes:
    return DraftNodes(nodes.token_ids.clone(), nodes.parents.clone(), nodes.num_used.clone())


@st.composite
def _eagle_trees(draw: st.DrawFn, num_requests: int) -> EagleTrees:
    """As EAGLE's loop lays candidates out: topk below the root, and topk below each of topk others
    in every later step."""
    num_steps, topk = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_groups = 1 + (num_steps - 1) * topk
    num_nodes = draw(st.integers(1, min(num_groups * topk, 6)))
    has_orphans = draw(st.booleans())  # selected without their parents: ties
    index = torch.zeros((num_requests, num_nodes), dtype=torch.int64)
    parent_list = torch.full((num_requests, num_groups if num_steps > 1 else 0), -1)
    tokens, ranks = torch.zeros_like(index), torch.zeros_like(index)
    for row in range(num_requests):
        # What each later group of candidates hangs below: one of the step before.
        for step, place in itertools.product(range(1, num_steps), range(topk)):
            earlier = (
                range(topk)
                if step == 1
                else range(topk + (step - 2) * topk**2, topk + (step - 1) * topk**2)
            )
            parent_list[row, 1 + (step - 1) * topk + place] = draw(st.sampled_from(list(earlier)))
        chosen: list[int] = []
        while len(chosen) < num_nodes:
            free = [
                candidate
                for candidate in range(num_groups * topk)
                if candidate not in chosen
                and (
                    candidate < topk
                    or int(parent_list[row, candidate // topk]) in chosen
                    or has_orphans
                )
            ]
            chosen.append(draw(st.sampled_from(free)))
        order = sorted(chosen)
        index[row] = torch.tensor(order)
        by_rank = order if has_orphans else chosen  # no node before its parent
        ranks[row] = torch.tensor([by_rank.index(candidate) for candidate in order])
        # Unlike siblings.
        tokens[row] = torch.tensor([candidate % topk for candidate in order])
    num_kept = torch.tensor([draw(st.integers(1, num_nodes)) for _ in range(num_requests)])
    has_ranks = draw(st.booleans())
    return EagleTrees(tokens, parent_list, index, topk, ranks if has_ranks else None, num_kept)


@st.composite
def _batches(
    draw: st.DrawFn,
) -> tuple[DraftNodes, EagleTrees, torch.Tensor | None]:
    cached = draw(st.lists(tries(5), min_size=1, max_size=3))
    rows = draw(
        st.none()
        | st.lists(st.integers(0, len(cached) - 1), min_size=1, max_size=3, unique=True).map(sorted)
    )
    trees = draw(_eagle_trees(len(cached) if rows is None else len(rows)))
    width = 1 + max(map(len, cached)) + trees.token_ids.shape[1]
    nodes = _nodes(cached, width, width + draw(st.integers(0, 2)))
    return nodes, trees, None if rows is None else torch.tensor(rows)


@pytest.fixture(autouse=True)
def _in_the_interpreter() -> None:
    assert has_kernels(torch.device("cpu"), 8), "to be run with TRITON_INTERPRET=1"


@settings(max_examples=60, deadline=None)
@given(_batches())
def test_merging_equals_that_on_the_host(
    batch: tuple[DraftNodes, EagleTrees, torch.Tensor | None],
) -> None:
    nodes, trees, rows = batch
    on_host = _copied(nodes)
    is_wanted = host_layout.merge(on_host, trees, rows)
    assert torch.equal(merge_eagle_trees(nodes, trees, rows), is_wanted)
    # Both have written in place, in the used slots the same.
    assert torch.equal(nodes.num_used, on_host.num_used)
    for row, num in enumerate(nodes.num_used.tolist()):
        for mine, theirs in (
            (nodes.token_ids, on_host.token_ids),
            (nodes.parents, on_host.parents),
        ):
            assert torch.equal(mine[row, 1:num], theirs[row, 1:num])
    _check_layout(nodes)


def _check_layout(nodes: DraftNodes) -> None:
    n, w = nodes.parents.shape
    seq_lens = torch.arange(n) * 7 % 5
    num_cells = w * int(seq_lens.sum() + n * w)
    for mode, size in ((TreeMaskMode.QLEN_ONLY, n * w * w), (TreeMaskMode.FULL_MASK, num_cells)):
        for has_buffer in (False, True):
            found, wanted = (
                run(
                    nodes,
                    seq_lens,
                    mode=mode,
                    num_cells=num_cells,
                    buffer=torch.zeros(size + 3, dtype=torch.uint8) if has_buffer else None,
                )
                for run in (lay_out, _lay_out_on_host)
            )
            for name in ("positions", "next_token", "next_sibling", "mask"):
                assert torch.equal(getattr(found, name), getattr(wanted, name)), (mode, name)


def _lay_out_on_host(nodes: DraftNodes, *args: Any, **kwargs: Any) -> VerifyLayout:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "has_kernels", lambda *_: False)
        return lay_out(nodes, *args, **kwargs)


@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 65, 128])
def test_layouts_of_all_widths_equal_those_on_the_host(width: int) -> None:
    torch.manual_seed(width)
    slots = range(1, width)
    chain = [(slot - 1, 0) for slot in slots]
    bushy = [(int(torch.randint(0, slot, ())), slot) for slot in slots]
    _check_layout(_nodes([chain, bushy, bushy[: width // 2], []], width, width))


def test_every_small_tree_is_laid_out_as_on_the_host() -> None:
    trees = [
        [(parent, 0) for parent in parents]
        for num_nodes in range(5)
        for parents in itertools.product(*(range(node + 1) for node in range(num_nodes)))
    ]
    _check_layout(_nodes(trees, 6, 6))


def test_more_requests_than_are_summed_at_once() -> None:
    _check_layout(_nodes([[(0, 1)]] * 300, 3, 3))


def test_trees_of_more_nodes_than_kernels_hold_are_made_on_the_host() -> None:
    nodes = _nodes([[(slot, 0) for slot in range(140)]], 141, 141)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_kernels, "lay_out", None)
        _check_layout(nodes)


@pytest.mark.parametrize("topk", [1, 4])
def test_all_that_a_server_takes_can_be_compiled_before(topk: int) -> None:
    for mode in (TreeMaskMode.QLEN_ONLY, TreeMaskMode.FULL_MASK):
        warm_up(torch.device("cpu"), mode, [1, 4, 32, 65, 200], [topk, 15, 40], topk)
        warm_up(torch.device("cpu"), mode, [16], [15], topk)
