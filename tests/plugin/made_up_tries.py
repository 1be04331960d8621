"""Random draft trees for the tests of the verify tree."""

from hypothesis import strategies as st

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
