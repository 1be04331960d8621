"""How probable the nodes of the model drafter's tree are, one beside the other."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.speculative import eagle_worker_v2

from sglang_hvd.plugin.engine.draft_worker import _ranking_nodes


def _ranks(scores: list[list[float]], num_nodes: int) -> list[int]:
    """Scores list the candidates of each step."""
    lists = [torch.tensor([[row]]) for row in scores]
    tokens = [torch.zeros(1, len(row), dtype=torch.int64) for row in scores]
    with _ranking_nodes(True) as ranks:
        eagle_worker_v2.organize_draft_results(lists, tokens, tokens, 1 + num_nodes)
    [of_tree] = ranks
    return of_tree[0].tolist()


def test_the_most_probable_node_is_the_first_kept() -> None:
    assert _ranks([[0.6, 0.3], [0.2, 0.5]], 4) == [0, 2, 3, 1]
    assert _ranks([[0.6, 0.3], [0.2, 0.5]], 3) == [0, 2, 1]  # of those that are in the tree


@pytest.mark.parametrize("num", [16, 60])
def test_of_equal_scores_no_node_comes_before_its_parent(num: int) -> None:
    assert _ranks([[0.25] * num] * 3, 3 * num) == list(range(3 * num))


def test_sglang_selects_as_before_afterwards() -> None:
    before = eagle_worker_v2.organize_draft_results
    with _ranking_nodes(True), pytest.raises(RuntimeError):
        raise RuntimeError
    assert eagle_worker_v2.organize_draft_results is before
