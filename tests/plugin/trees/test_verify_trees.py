"""The verify tree against a plain walk over the nodes and against SGLang's own tree builder."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode
from sglang.srt.speculative.eagle_utils import (
    build_tree_kernel_efficient,
    organize_draft_results,
)
from sglang.srt.speculative.spec_utils import select_top_k_tokens

from sglang_hvd.plugin.trees.draft_trees import DraftNodes, EagleTrees, VerifyLayout
from sglang_hvd.plugin.trees.layout import lay_out, merge_eagle_trees
from sglang_hvd.plugin.trees.verify_input import num_accepted_of_model
from tests.plugin.trees.made_up_tries import Tree, eagle_trees_of, tries


def _nodes(rows: list[list[int]], width: int) -> DraftNodes:
    """Rows list the parent of nodes 1, 2, ...; node 0 is the root."""
    parents = torch.full((len(rows), width), -1)
    for row, given_parents in zip(parents, rows, strict=True):
        row[1 : 1 + len(given_parents)] = torch.tensor(given_parents, dtype=torch.int64)
    num_used = torch.tensor([1 + len(row) for row in rows])
    return DraftNodes(torch.zeros_like(parents), parents, num_used)


def _roots(token_ids: torch.Tensor, width: int) -> DraftNodes:
    """Requests without cache drafts. token_ids: int64[n]."""
    nodes = torch.full((len(token_ids), width), 77)
    nodes[:, 0] = token_ids
    return DraftNodes(nodes, torch.full_like(nodes, -1), torch.ones_like(token_ids))


def _laid_out(nodes: DraftNodes, seq_lens: torch.Tensor | None = None) -> VerifyLayout:
    if seq_lens is None:
        seq_lens = torch.zeros(len(nodes.num_used), dtype=torch.int64)
    return lay_out(nodes, seq_lens, mode=TreeMaskMode.QLEN_ONLY, num_cells=0, buffer=None)


@st.composite
def _trees(draw: st.DrawFn) -> list[list[int]]:
    num_nodes = draw(st.lists(st.integers(0, 11), min_size=1, max_size=4))
    return [[draw(st.integers(0, node)) for node in range(count)] for count in num_nodes]


@settings(max_examples=200, deadline=None)
@given(_trees())
def test_links_depth_and_visibility_equal_a_walk_over_the_nodes(rows: list[list[int]]) -> None:
    width = 12
    tree = _laid_out(_nodes(rows, width))
    visible = tree.mask.view(len(rows), width, width)
    for b, given_parents in enumerate(rows):
        parent = [-1, *given_parents]
        for node in range(width):
            is_used = node < len(parent)
            path = [node]
            while is_used and parent[path[-1]] >= 0:
                path.append(parent[path[-1]])
            expected = set(path) if is_used else {0, node}
            assert set(torch.nonzero(visible[b, node]).flatten().tolist()) == expected
            assert tree.positions[b, node] == len(expected) - 1
            children = [c for c in range(len(parent)) if is_used and parent[c] == node]
            assert tree.next_token[b, node] == (children[0] if children else -1)
            later = [
                c
                for c in range(node + 1, len(parent))
                if is_used and node > 0 and parent[c] == parent[node]
            ]
            assert tree.next_sibling[b, node] == (later[0] if later else -1)


def _eagle_candidates(
    num_requests: int, topk: int, num_steps: int, num_nodes: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SGLang's own draft loop over random scores instead of a model."""
    torch.manual_seed(seed)
    hidden = torch.zeros(num_requests, 1)
    scores, score_list, token_list, parents_list = None, [], [], []
    num_rows = num_requests
    for step in range(num_steps):
        probs = torch.rand(num_rows, topk).sort(dim=1, descending=True).values
        tokens = torch.randint(0, 1000, (num_rows, topk))
        _, hidden, scores, info = select_top_k_tokens(step, probs, tokens, hidden, scores, topk)
        score_list.append(info[0])
        token_list.append(info[1])
        parents_list.append(info[2])
        num_rows = num_requests * topk
    return organize_draft_results(score_list, token_list, parents_list, num_nodes)


@pytest.mark.parametrize(
    ("topk", "num_steps", "num_nodes"), [(4, 3, 16), (4, 8, 32), (2, 2, 5), (3, 1, 4), (1, 4, 5)]
)
def test_an_eagle_tree_is_laid_out_as_sglang_lays_it_out(
    topk: int, num_steps: int, num_nodes: int
) -> None:
    num_requests = 5
    parent_list, top_scores_index, draft_tokens = _eagle_candidates(
        num_requests, topk, num_steps, num_nodes, seed=num_nodes
    )
    seq_lens = torch.tensor([3, 1, 7, 20, 4])
    bonus = torch.arange(num_requests)
    mask, positions, _, next_token, next_sibling, tokens = build_tree_kernel_efficient(
        bonus,
        parent_list,
        top_scores_index,
        draft_tokens,
        seq_lens,
        int(seq_lens.sum()),
        topk,
        num_steps,
        num_nodes,
        TreeMaskMode.QLEN_ONLY,
    )
    nodes = _roots(bonus, num_nodes)
    num_kept = torch.full((num_requests,), num_nodes)
    trees = EagleTrees(draft_tokens, parent_list, top_scores_index, topk, None, num_kept)
    is_model_node = merge_eagle_trees(nodes, trees, None)
    assert torch.equal(nodes.token_ids.reshape(-1), tokens)
    assert is_model_node[:, 1:].all()
    assert not is_model_node[:, 0].any()
    layout = _laid_out(nodes, seq_lens)
    assert torch.equal(layout.next_token, next_token)
    assert torch.equal(layout.next_sibling, next_sibling)
    assert torch.equal(layout.positions.reshape(-1), positions)
    assert torch.equal(layout.mask, mask)


def test_a_node_whose_parent_was_not_selected_is_not_verified() -> None:
    # Of topk 2 and three steps: candidates 0 and 1 below the root, 2 and 3 below 0, 4 and 5 below
    # 1, then 6 and 7 below 4, 8 and 9 below 5. Of equal scores 4 was selected and 1 was not.
    parent_list = torch.tensor([[-1, 0, 1, 4, 5]])
    selected = torch.tensor([[0, 3, 4, 6]])
    tokens = torch.tensor([[10, 11, 10, 12]])  # 4 has the token of 0, a child of the root
    for cached, wanted in (
        ([], [(-1, 5), (0, 10), (1, 11)]),
        # The cache's draft begins with the orphan's token and goes on with that of its child.
        ([(0, 10), (1, 12)], [(-1, 5), (0, 10), (1, 12), (1, 11)]),
    ):
        nodes = DraftNodes(
            torch.tensor([[5, *(token for _, token in cached), *[0] * 6]]),
            torch.tensor([[-1, *(parent for parent, _ in cached), *[0] * 6]]),
            torch.tensor([1 + len(cached)]),
        )
        trees = EagleTrees(tokens, parent_list, selected, 2, None, torch.tensor([4]))
        is_model_node = merge_eagle_trees(nodes, trees, None)
        num = int(nodes.num_used[0])
        rows = zip(nodes.parents[0, :num].tolist(), nodes.token_ids[0, :num].tolist(), strict=True)
        assert list(rows) == wanted
        assert int(is_model_node.sum()) == 2


def test_a_full_mask_is_true_over_the_prefix_and_leaves_the_rest_of_the_buffer_alone() -> None:
    width = 3
    nodes = _nodes([[0, 0], [0], []], width)
    visible = _laid_out(nodes).mask.view(3, width, width)
    seq_lens = torch.tensor([2, 0, 4])
    num_cells = width * int(seq_lens.sum() + 3 * width)
    buffer = torch.zeros(num_cells + 5, dtype=torch.bool)
    layout = lay_out(
        nodes, seq_lens, mode=TreeMaskMode.FULL_MASK, num_cells=num_cells, buffer=buffer
    )
    assert layout.mask is buffer
    assert not buffer[num_cells:].any()
    first = 0
    for request, seq_len in enumerate(seq_lens.tolist()):
        rows = buffer[first : first + width * (seq_len + width)].view(width, seq_len + width)
        assert rows[:, :seq_len].all()
        assert torch.equal(rows[:, seq_len:], visible[request])
        first += rows.numel()
    assert first == num_cells


def test_a_mask_layout_that_is_not_written_here_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="QLEN_ONLY_BITPACKING"):
        lay_out(
            _nodes([[0]], 2),
            torch.tensor([1]),
            mode=TreeMaskMode.QLEN_ONLY_BITPACKING,
            num_cells=0,
            buffer=None,
        )


def test_what_is_no_tree_is_refused() -> None:
    for parents in ([[1]], [[-1]], [[0, 2]]):
        with pytest.raises(ValueError, match="a node stands after its parent"):
            _laid_out(_nodes(parents, 3))
    nodes = _nodes([[0]], 3)
    nodes.num_used[0] = 4
    with pytest.raises(ValueError, match="a row has its root, and room"):
        _laid_out(nodes)
    with pytest.raises(ValueError, match="a row has no room for all drafts"):
        merge_eagle_trees(_nodes([[0]], 3), eagle_trees_of([[(0, 1), (0, 2)]]), None)


def test_a_mask_that_is_too_small_is_not_written_beyond_its_end() -> None:
    for mode, num_cells in ((TreeMaskMode.QLEN_ONLY, 9), (TreeMaskMode.FULL_MASK, 3 * (5 + 3))):
        buffer = torch.zeros(num_cells - 1, dtype=torch.bool)
        with pytest.raises(ValueError, match="the mask is too small"):
            lay_out(_nodes([[0]], 3), torch.tensor([5]), mode=mode, num_cells=0, buffer=buffer)


@pytest.mark.parametrize("has_rows", [False, True])
def test_merging_writes_into_the_nodes(has_rows: bool) -> None:
    nodes = DraftNodes(
        torch.tensor([[1, 7, 0, 0], [2, 0, 0, 0]]),
        torch.tensor([[-1, 0, -1, -1], [-1, -1, -1, -1]]),
        torch.tensor([2, 1]),
    )
    num = 1 if has_rows else 2
    index = torch.arange(2).repeat(num, 1)  # two nodes below the root, 7 and 8
    trees = EagleTrees(index + 7, torch.full((num, 0), -1), index, 2, None, torch.full((num,), 2))
    is_model_node = merge_eagle_trees(nodes, trees, torch.tensor([1]) if has_rows else None)
    first = [1, 7, 0, 0] if has_rows else [1, 7, 8, 0]
    assert nodes.token_ids.tolist() == [first, [2, 7, 8, 0]]
    assert nodes.parents.tolist() == [[-1, 0, -1 if has_rows else 0, -1], [-1, 0, 0, -1]]
    assert nodes.num_used.tolist() == [2 if has_rows else 3, 3]
    assert is_model_node.tolist() == [
        [False, not has_rows, not has_rows, False],
        [False, True, True, False],
    ]


# A cache draft, a model drafter's tree, and what is kept of that.
Drafts = tuple[Tree, Tree, list[bool]]


@st.composite
def _both_drafts(draw: st.DrawFn) -> Drafts:
    cached, tree = draw(tries(6)), draw(tries(6))
    is_kept: list[bool] = []
    for parent, _ in tree:
        with_parent = parent == 0 or is_kept[parent - 1]
        is_kept.append(with_parent and draw(st.booleans()))
    return cached, tree, is_kept


def _paths(tree: Tree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, the root's first: it has none."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in tree:
        paths.append((*paths[parent], token))
    return paths


def _kept(tree: Tree, is_kept: list[bool]) -> set[tuple[int, ...]]:
    return {path for path, is_in in zip(_paths(tree)[1:], is_kept, strict=True) if is_in}


def _merge(batch: list[Drafts], width: int) -> tuple[DraftNodes, torch.Tensor]:
    token_ids = torch.full((len(batch), width), 77)
    parents = torch.arange(-1, width - 1).repeat(len(batch), 1)
    for row, (cached, _, _) in enumerate(batch):
        for node, (parent, token) in enumerate(cached):
            parents[row, 1 + node], token_ids[row, 1 + node] = parent, token
    num_used = torch.tensor([1 + len(cached) for cached, _, _ in batch])
    nodes = DraftNodes(token_ids, parents, num_used)
    trees = eagle_trees_of([tree for _, tree, _ in batch], [is_kept for _, _, is_kept in batch])
    return nodes, merge_eagle_trees(nodes, trees, None)


@settings(max_examples=400, deadline=None)
@given(st.lists(_both_drafts(), min_size=1, max_size=3))
def test_both_drafts_make_one_trie_of_their_paths(
    batch: list[Drafts],
) -> None:
    width = 1 + max(len(cached) + sum(is_kept) for cached, _, is_kept in batch)
    merged, is_model_node = _merge(batch, width)
    for row, (cached, tree, is_kept) in enumerate(batch):
        kept = _kept(tree, is_kept)
        wanted = set(_paths(cached)) | kept
        num = int(merged.num_used[row])
        parents, tokens = merged.parents[row, :num].tolist(), merged.token_ids[row, :num].tolist()
        assert all(parent < node for node, parent in enumerate(parents))
        paths = _paths(list(zip(parents[1:], tokens[1:], strict=True)))
        assert len(paths) == len(set(paths))  # siblings differ
        assert set(paths) == wanted
        marked = {
            path for path, is_in in zip(paths, is_model_node[row].tolist(), strict=False) if is_in
        }
        assert marked == kept
        assert not is_model_node[row, num:].any()


def _accepts(paths: set[tuple[int, ...]], text: list[int]) -> int:
    """Tokens of the text that a tree of these paths has in a row."""
    return next(n for n in range(len(text), -1, -1) if n == 0 or tuple(text[:n]) in paths)


def _check_acceptance(batch: list[Drafts], text: list[int]) -> None:
    """Walks the links as greedy verification does, and compares with the drafts themselves."""
    width = 1 + max(len(cached) + sum(is_kept) for cached, _, is_kept in batch)
    merged, is_model_node = _merge(batch, width)
    tree = _laid_out(merged)
    next_token, next_sibling = tree.next_token.tolist(), tree.next_sibling.tolist()
    token_ids = merged.token_ids.tolist()
    accept_index = torch.full((len(batch), width), -1)
    for row in range(len(batch)):
        accept_index[row, 0] = row * width
        depth, child = 0, next_token[row][0]
        while child >= 0 and depth < len(text):
            if token_ids[row][child] != text[depth]:
                child = next_sibling[row][child]
                continue
            depth += 1
            accept_index[row, depth] = row * width + child
            child = next_token[row][child]
    of_both = ((accept_index >= 0).sum(dim=1) - 1).tolist()
    num_model = num_accepted_of_model(accept_index, is_model_node).tolist()
    for row, (cached, model_tree, is_kept) in enumerate(batch):
        of_cache = _accepts(set(_paths(cached)), text)
        of_tree = _accepts(_kept(model_tree, is_kept), text)
        assert of_both[row] == max(of_cache, of_tree)
        assert num_model[row] == of_tree


@settings(max_examples=300, deadline=None)
@given(
    st.lists(_both_drafts(), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_the_longer_path_is_accepted_and_the_model_drafters_part_is_known(
    batch: list[Drafts], text: list[int]
) -> None:
    _check_acceptance(batch, text)


def _all_trees(num_nodes: int) -> list[Tree]:
    """All of up to so many nodes with two tokens."""
    trees: list[Tree] = [[]]
    found = list(trees)
    for _ in range(num_nodes):
        trees = [
            [*tree, (parent, token)]
            for tree in trees
            for parent in range(len(tree) + 1)
            for token in range(2)
            if (parent, token) not in tree
        ]
        found += trees
    return found


def test_every_two_small_trees_accept_every_text_as_they_should() -> None:
    trees = _all_trees(3)
    batch = [(cached, tree, [True] * len(tree)) for cached in trees for tree in trees]
    for text in itertools.product(range(2), repeat=4):
        _check_acceptance(batch, list(text))
