"""Which verifications need the accepted path moved to the front of each row, and what a device is
sent of their drafts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

from sglang_hvd.plugin.device.host_transfer import all_to_device
from sglang_hvd.plugin.engine.step_drafts import StepDrafts, _nodes_of, _roots
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.plugin.trees import host_layout
from sglang_hvd.step_clock import StepClock
from sglang_hvd.types import DraftBatch, DraftPlans

WIDTH = 4


def step_of(num_cache: list[int], are_trees: list[bool], num_model: list[int]) -> StepPlan:
    """One whose requests verify so many nodes of the cache and of the model drafter."""
    num = len(num_cache)
    drafts = DraftBatch.of_size(num, WIDTH - 1).chains(np.array(num_cache, np.int32))
    token_ids = np.arange(drafts.token_ids.size, dtype=np.int32).reshape(drafts.token_ids.shape)
    plans = replace(
        DraftPlans.plain(num),
        drafts=replace(drafts, token_ids=token_ids, are_trees=np.array(are_trees)),
        num_model_nodes=np.array(num_model, np.int32),
    )
    held: Any = [None] * num
    return StepPlan(held, plans, cached_lens=[9] * num, width=WIDTH, num_plain=0)


def step_drafts_on(device: str, topk: int) -> StepDrafts:
    runner = SimpleNamespace(attn_backend=SimpleNamespace(verify_mask=None))
    draft_worker: Any = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=runner),
        device=device,
        topk=topk,
        mask_mode=TreeMaskMode.QLEN_ONLY,
    )
    states: Any = SimpleNamespace(widths=SimpleNamespace(values=(1, WIDTH)))
    costs: Any = None  # times drafts only
    return StepDrafts(draft_worker, states, costs=costs, clock=StepClock())


def has_branches(
    topk: int, num_cache: list[int], are_trees: list[bool], num_model: list[int]
) -> bool:
    """Of a step whose requests verify so many nodes of the cache and of the model drafter."""
    num = len(num_cache)
    plan, step_drafts = step_of(num_cache, are_trees, num_model), step_drafts_on("cpu", topk)
    batch: Any = SimpleNamespace(
        reqs=plan.held,
        seq_lens=torch.full((num,), 9),
        seq_lens_sum=9 * num,
        spec_info=SimpleNamespace(bonus_tokens=torch.zeros(num, dtype=torch.int64)),
    )
    return step_drafts.lay_out(batch, plan, None, {}).has_branches


@pytest.mark.parametrize(
    ("topk", "num_cache", "is_tree", "num_model", "expected"),
    [
        (1, 0, False, 0, False),
        (1, 2, False, 0, False),  # a chain of the cache
        (1, 2, True, 0, True),
        (1, 0, False, 2, False),  # a chain of the model drafter
        (1, 1, False, 2, True),  # both in one tree
        (2, 0, False, 0, False),
        (2, 2, False, 0, False),
        (2, 2, True, 0, True),
        (2, 0, False, 2, True),  # a tree of the model drafter
        (2, 1, False, 2, True),
    ],
)
def test_drafts_branch_if_they_are_trees_or_stand_side_by_side(
    topk: int, num_cache: int, is_tree: bool, num_model: int, expected: bool
) -> None:
    assert has_branches(topk, [num_cache], [is_tree], [num_model]) is expected
    # In a step with a request that has no draft, too.
    assert has_branches(topk, [0, num_cache], [False, is_tree], [0, num_model]) is expected


def test_chains_of_different_requests_do_not_branch() -> None:
    assert not has_branches(1, [2, 0], [False, False], [0, 2])


def test_a_device_is_sent_the_nodes_that_the_host_lays_out() -> None:
    plan = step_of([3, 0, 2], [False] * 3, [0, 2, 1])
    drafts = plan.drafts.drafts
    roots, seq_lens = torch.tensor([71, 72, 73]), torch.tensor([9, 9, 9])
    sent = all_to_device(step_drafts_on("cuda", 1).arrays(plan), "cpu")
    nodes = _nodes_of(sent["cache_nodes"], roots)
    mask = torch.empty(3 * WIDTH * WIDTH, dtype=torch.bool)
    expected = host_layout.lay_out_drafts(
        drafts, roots, seq_lens, WIDTH, mask, is_full_mask=False, trees=None, rows=None
    ).nodes
    assert nodes.num_used.tolist() == expected.num_used.tolist() == [4, 1, 3]
    for row, num in enumerate(nodes.num_used.tolist()):
        for name in ("token_ids", "parents"):
            of, of_host = getattr(nodes, name)[row, :num], getattr(expected, name)[row, :num]
            assert of[1:].tolist() == of_host[1:].tolist()
        assert nodes.token_ids[row, 0] == expected.token_ids[row, 0]
    assert sent["drafting_rows"].tolist() == [1, 2]
    assert sent["num_kept"].tolist() == [2, 1]


def test_a_step_without_drafts_sends_no_nodes() -> None:
    plan = replace(step_of([0, 0], [False] * 2, [0, 0]), width=1)
    assert step_drafts_on("cuda", 1).arrays(plan) == {}
    nodes = _roots(torch.tensor([71, 72], dtype=torch.int32))
    assert nodes.token_ids.tolist() == [[71], [72]]
    assert (nodes.parents.tolist(), nodes.num_used.tolist()) == ([[0], [0]], [1, 1])
