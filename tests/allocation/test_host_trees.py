"""Cache drafts that branch, against a walk over their paths."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_hvd.allocation import HostTrees
from sglang_hvd.replay.core.single_cycles import single_drafts
from sglang_hvd.types import DraftBatch

SHARE = 0.45
LONGEST = 6

Path = tuple[int, ...]
# A chain with its survival, and a tree of votes: parent, token and probability given the parent.
Row = tuple[list[int], list[float], list[tuple[int, int, float]]]


@st.composite
def _rows(draw: st.DrawFn) -> Row:
    chain = draw(st.lists(st.integers(0, 2), max_size=LONGEST))
    survival = np.cumprod([draw(st.floats(0, 1, width=16)) for _ in chain]).tolist()
    tree: list[tuple[int, int, float]] = []
    left = {-1: 1.0}  # of each node's votes, what its children do not have yet
    for node in range(draw(st.integers(0, 8))):
        taken = [(parent, token) for parent, token, _ in tree]
        free = [(p, t) for p in range(-1, node) for t in range(3) if (p, t) not in taken]
        parent, token = draw(st.sampled_from(free))
        prob = left[parent] * draw(st.floats(0.125, 0.75, width=16))
        left[parent] -= prob
        left[node] = 1.0
        tree.append((parent, token, prob))
    return chain, survival, tree


def _votes(rows: list[Row]) -> DraftBatch:
    batch = DraftBatch.of_size(len(rows), 8)
    for row, (_, _, tree) in enumerate(rows):
        batch.num_nodes[row] = len(tree)
        for node, (parent, token, prob) in enumerate(tree):
            batch.parents[row, node], batch.token_ids[row, node] = parent, token
            batch.depths[row, node] = 1 if parent < 0 else 1 + batch.depths[row, parent]
            before = 1.0 if parent < 0 else batch.probs[row, parent]
            batch.probs[row, node] = prob * before
    return batch


def _joined(rows: list[Row], room: int) -> HostTrees:
    chains = DraftBatch.of_size(len(rows), LONGEST)
    survival = np.zeros((len(rows), LONGEST), np.float32)
    for row, (chain, of_chain, _) in enumerate(rows):
        chains.token_ids[row, : len(chain)] = chain
        chains.num_nodes[row] = len(chain)
        survival[row, : len(chain)] = of_chain
    trees = HostTrees(len(rows), room)
    trees.join(chains, survival, _votes(rows))
    return trees


def _expected(row: Row) -> dict[Path, float]:
    """Each path of either draft and its probability, from the paths alone."""
    chain, survival, tree = row
    probs: dict[Path, float] = {(): 1.0}
    for length, prob in enumerate(survival, 1):
        probs[tuple(chain[:length])] = prob
    paths: list[Path] = []
    votes: dict[Path, float] = {(): 1.0}
    for parent, token, prob in tree:
        before = paths[parent] if parent >= 0 else ()
        paths.append((*before, token))
        votes[paths[-1]] = votes[before] * prob
    for path in paths:
        before = path[:-1]
        if path in probs:
            continue
        given = votes[path] / votes[before] if votes[before] > 0 else 0.0
        if before == tuple(chain[: len(before)]):
            on = tuple(chain[: len(path)])
            goes_on = probs[on] if len(on) == len(path) else 0.0
            others = 1 - votes.get(on, 0.0) / votes[before] if len(on) == len(path) else 1.0
            probs[path] = SHARE * (probs[before] - goes_on) * min(given / max(others, 1e-9), 1)
        else:
            probs[path] = probs[before] * min(given, 1)
    return {path: prob for path, prob in probs.items() if path}


@settings(max_examples=300, deadline=None)
@given(st.lists(_rows(), min_size=1, max_size=3), st.integers(1, 16))
def test_the_most_probable_nodes_of_both_come_first_each_after_its_parent(
    rows: list[Row], room: int
) -> None:
    trees = _joined(rows, room)
    for row, given_row in enumerate(rows):
        expected = _expected(given_row)
        num = int(trees.num_nodes[row])
        assert num == min(len(expected), room)
        paths: list[Path] = []
        for node in range(num):
            parent = int(trees.parents[row, node])
            assert parent < node
            before = paths[parent] if parent >= 0 else ()
            paths.append((*before, int(trees.token_ids[row, node])))
            assert trees.depths[row, node] == len(paths[-1])
            assert trees.is_chain[row, node] == (paths[-1] == tuple(given_row[0][: len(paths[-1])]))
        assert len(set(paths)) == num
        probs = trees.probs[row, :num]
        assert probs == pytest.approx([expected[path] for path in paths], abs=1e-4)
        assert (np.diff(probs) <= 0).all()
        rest = [prob for path, prob in expected.items() if path not in paths]
        assert not rest or max(rest) <= probs[-1] + 1e-4


def test_a_part_of_a_draft_is_a_chain_or_says_where_it_branches() -> None:
    # The chain 1, 2, 3; the votes would rather go on with 4 behind 1.
    rows: list[Row] = [([1, 2, 3], [0.9, 0.5, 0.4], [(-1, 1, 1.0), (0, 2, 0.5), (0, 4, 0.5)])]
    trees = _joined(rows, 8)
    assert trees.token_ids[0, :4].tolist() == [1, 2, 3, 4]
    assert trees.probs[0, :4] == pytest.approx([0.9, 0.5, 0.4, SHARE * 0.4])
    chains = DraftBatch.of_size(1, LONGEST)
    chains.matches[0, 0] = 7
    survival = np.linspace(0.8, 0.1, 8, dtype=np.float32)[None]
    for num, parents, chain_len in ((2, None, 2), (3, None, 3), (4, [-1, 0, 1, 0], 3)):
        taken = trees.take(np.array([num], np.int32), survival, chains, width=4)
        assert taken.chain_lens.tolist() == [chain_len]
        assert taken.chain_predicted == pytest.approx([survival[0, :chain_len].sum()])
        [draft] = single_drafts(taken.drafts)
        assert draft is not None
        assert draft.token_ids.tolist() == [1, 2, 3, 4][:num]
        assert (None if draft.parents is None else draft.parents.tolist()) == parents
        assert draft.match_len == 7
    nothing = trees.take(np.zeros(1, np.int32), survival, chains, width=0)
    assert nothing.drafts.num_nodes.tolist() == [0]


def test_a_tree_whose_nodes_stand_before_their_parents_is_refused() -> None:
    trees, chains = HostTrees(1, 4), DraftBatch.of_size(1, LONGEST)
    votes = _votes([([], [], [(-1, 1, 0.5)])])
    votes.parents[0, 0] = 0
    with pytest.raises(ValueError, match="a node stands after its parent"):
        trees.join(chains, np.zeros((1, LONGEST), np.float32), votes)


@settings(max_examples=200, deadline=None)
@given(st.lists(_rows(), min_size=2, max_size=4), st.data())
def test_a_part_of_each_draft_of_a_batch_is_taken(rows: list[Row], data: st.DataObject) -> None:
    room = 8
    trees = _joined(rows, room)
    num_nodes = np.array([data.draw(st.integers(0, int(n))) for n in trees.num_nodes], np.int32)
    num_nodes = num_nodes[: len(rows)]
    chains = DraftBatch.of_size(len(rows), room)
    chains.num_nodes[:] = [len(row[0]) for row in rows]
    chains.matches[:, 0] = np.arange(len(rows)) + 5
    survival = np.random.default_rng(0).random((len(rows), room), np.float32)
    width = data.draw(st.integers(int(num_nodes.max()), room))
    taken = trees.take(num_nodes, survival, chains, width=width)
    assert taken.drafts.token_ids.shape == taken.drafts.parents.shape == (len(rows), width)
    for row, num in enumerate(num_nodes.tolist()):
        is_chain = trees.is_chain[row, :num]
        chain_len = int(is_chain.sum())
        assert taken.drafts.are_trees[row] == (chain_len < num)
        if num and not chain_len and rows[row][0]:
            chain_len = 1  # what is committed tells of the chain's first token
        assert taken.chain_lens[row] == chain_len
        assert taken.chain_predicted[row] == pytest.approx(survival[row, :chain_len].sum())
        for found, whole in (
            (taken.drafts.token_ids, trees.token_ids),
            (taken.drafts.parents, trees.parents),
        ):
            assert found[row].tolist() == [*whole[row, :num].tolist(), *[0] * (width - num)]
    assert taken.drafts.num_nodes.tolist() == num_nodes.tolist()
    assert taken.drafts.matches.tolist() == chains.matches.tolist()


def _paths(trees: HostTrees, row: int) -> list[Path]:
    paths: list[Path] = []
    for node in range(int(trees.num_nodes[row])):
        parent = int(trees.parents[row, node])
        assert parent < node
        before = paths[parent] if parent >= 0 else ()
        paths.append((*before, int(trees.token_ids[row, node])))
        assert trees.depths[row, node] == len(paths[-1])
    assert len(set(paths)) == len(paths)
    return paths


# The node that both drafts have grows by a rest that rounds up, above its parent.
_ROUNDS_UP: list[Row] = [
    (
        [2, 0, 0, 0, 0, 0],
        [0.50341796875, 0.0, 0.0, 0.0, 0.0, 0.0],
        [(-1, 1, 0.5), (-1, 2, 0.1781005859375), (0, 2, 0.515625), (-1, 0, 0.080474853515625)],
    ),
    ([], [], []),
    ([], [], [(-1, 1, 0.75), (0, 2, 0.75)]),
]


@settings(max_examples=300, deadline=None)
@example(_ROUNDS_UP, 0)
@given(st.lists(_rows(), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_the_draft_of_another_source_joins_the_tree(rows: list[Row], seed: int) -> None:
    """A made-up second source that the host knows: equal prefixes are shared."""
    random = np.random.default_rng(seed)
    shuffled = [rows[place] for place in random.permutation(len(rows))]
    others: list[Row] = [([], [], votes[: random.integers(0, 9)]) for _, _, votes in shuffled]
    drafts, trees = _votes(others), _joined(rows, 40)
    of_cache = [
        dict(zip(_paths(trees, row), trees.probs[row].tolist(), strict=False))
        for row in range(len(rows))
    ]
    trees.add(drafts, len(rows), 4)
    nothing = DraftBatch.of_size(len(rows), 1)
    for row in range(len(rows)):
        other: list[Path] = []
        for parent, token, _ in others[row][2]:
            other.append((*(other[parent] if parent >= 0 else ()), token))
        of_other = dict(zip(other, drafts.probs[row].tolist(), strict=False))
        paths = _paths(trees, row)
        assert set(paths) == set(of_cache[row]) | set(of_other)
        probs = dict(zip(paths, trees.probs[row].tolist(), strict=False))
        assert list(probs.values()) == sorted(probs.values(), reverse=True)
        for node, (path, prob) in enumerate(probs.items()):
            sources = (1 if path in of_cache[row] else 0) | (4 if path in of_other else 0)
            assert trees.sources[row, node] == sources
            before = of_cache[row].get(path, 0.0)
            assert before <= prob <= max(before, of_other.get(path, 0.0)) + 1e-6
            children = [p for other_path, p in probs.items() if other_path[:-1] == path]
            grown = sum(children) - sum(of_cache[row].get((*path, t), 0.0) for t in range(3))
            assert grown <= 1e-6 or sum(children) <= prob + 1e-6
        taken = trees.take(
            trees.num_nodes[: len(rows)], np.zeros((len(rows), 64), np.float32), nothing, width=40
        )
        wanted = (1 if of_cache[row] else 0) | (4 if of_other else 0)
        assert taken.source_sets[row] == wanted
