"""Random draft trees for the tests of the verify tree."""

import torch
from hypothesis import strategies as st

from sglang_hvd.plugin.trees.draft_trees import EagleTrees

# Of each node, but for the root, its parent and its token. The root is node 0.
Tree = list[tuple[int, int]]


@st.composite
def tries(draw: st.DrawFn, most: int) -> Tree:
    """Of up to so many nodes, with unlike siblings; few tokens, so that two of them often agree."""
    tree: Tree = []
    is_chain = draw(st.booleans())
    for node in range(draw(st.integers(0, most))):
        free = [
            (parent, token)
            for parent in range(node if is_chain else 0, node + 1)
            for token in range(3)
            if (parent, token) not in tree
        ]
        tree.append(draw(st.sampled_from(free)))
    return tree


def eagle_trees_of(trees: list[Tree], are_kept: list[list[bool]] | None = None) -> EagleTrees:
    """Trees as EAGLE's draft loop would leave them, filled up with nodes below the root that are
    not kept: each node is a candidate of its parent's group."""
    most = max([1, *map(len, trees)])
    topk = most + 1
    tokens = torch.full((len(trees), most), -2)
    parent_list = torch.full((len(trees), 1 + most), -1)
    index, ranks = torch.zeros_like(tokens), torch.full_like(tokens, most)
    num_kept = torch.zeros(len(trees), dtype=torch.int64)
    for row, tree in enumerate(trees):
        for node in range(most):
            parent = 0
            if node < len(tree):
                parent, tokens[row, node] = tree[node]
                if are_kept is None or are_kept[row][node]:
                    ranks[row, node] = num_kept[row]
                    num_kept[row] += 1
            index[row, node] = parent_list[row, 1 + node] = parent * topk + node
    return EagleTrees(tokens, parent_list, index, topk, ranks, num_kept)
