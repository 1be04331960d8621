"""What the model drafter is let draft."""

from collections.abc import Sequence

import pytest

from sglang_hvd.allocation import draft_step_choices, max_tree_nodes, model_tree_sizes


@pytest.mark.parametrize(
    ("num_nodes", "sizes"),
    [
        (1, (1,)),
        (2, (2,)),
        (3, (3,)),
        (6, (3, 6)),
        (7, (3, 7)),
        (8, (3, 7, 8)),
        (31, (3, 7, 15, 31)),
        (59, (3, 7, 15, 31, 59)),
    ],
)
def test_each_smaller_tree_has_half_the_nodes_with_its_root(
    num_nodes: int, sizes: Sequence[int]
) -> None:
    assert model_tree_sizes(num_nodes) == sizes


@pytest.mark.parametrize(
    ("num_steps", "choices"),
    [(1, (1,)), (3, (1, 2, 3)), (4, (1, 2, 3, 4)), (5, (1, 3, 5)), (8, (2, 4, 6, 8))],
)
def test_there_are_four_numbers_of_steps_at_most(num_steps: int, choices: Sequence[int]) -> None:
    assert draft_step_choices(num_steps) == choices


@pytest.mark.parametrize("topk", [1, 4, 8])
@pytest.mark.parametrize("num_steps", [1, 2, 6])
def test_a_tree_has_the_nodes_that_its_steps_score(topk: int, num_steps: int) -> None:
    num_leaves, num_nodes = 1, 0  # that a step expands; the root at first
    for _ in range(num_steps):
        num_nodes += num_leaves * topk
        num_leaves = topk
    assert max_tree_nodes(topk, num_steps) == num_nodes
