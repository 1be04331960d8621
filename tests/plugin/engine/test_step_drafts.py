"""Which verifications need the accepted path moved to the front of each row."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

from sglang_hvd.plugin.engine.step_drafts import StepDrafts
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.step_clock import StepClock
from sglang_hvd.types import DraftBatch, DraftPlans

WIDTH = 4


def has_branches(
    topk: int, num_cache: list[int], are_trees: list[bool], num_model: list[int]
) -> bool:
    """Of a step whose requests verify so many nodes of the cache and of the model drafter."""
    num = len(num_cache)
    drafts = DraftBatch.of_size(num, WIDTH - 1).chains(np.array(num_cache, np.int32))
    plans = replace(
        DraftPlans.plain(num),
        drafts=replace(drafts, are_trees=np.array(are_trees)),
        num_model_nodes=np.array(num_model, np.int32),
    )
    held: Any = [None] * num
    plan = StepPlan(held, plans, cached_lens=[9] * num, width=WIDTH, num_plain=0)
    runner = SimpleNamespace(attn_backend=SimpleNamespace(verify_mask=None))
    draft_worker: Any = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=runner),
        device="cpu",
        topk=topk,
        mask_mode=TreeMaskMode.QLEN_ONLY,
    )
    states: Any = SimpleNamespace(widths=SimpleNamespace(values=(1, WIDTH)))
    costs: Any = None  # times drafts only
    step_drafts = StepDrafts(draft_worker, states, costs=costs, clock=StepClock())
    batch: Any = SimpleNamespace(
        reqs=held,
        seq_lens=torch.full((num,), 9),
        seq_lens_sum=9 * num,
        spec_info=SimpleNamespace(bonus_tokens=torch.zeros(num, dtype=torch.int64)),
    )
    return step_drafts.lay_out(batch, plan, None).has_branches


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
