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
from sglang_hvd.plugin.engine.step_drafts import StepDrafts
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.plugin.trees.verify_input import HvdVerifyInput
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
    return StepPlan(held, plans, cached_lens=np.full(num, 9), width=WIDTH, num_plain=0)


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


def laid_out(plan: StepPlan, device: str, topk: int = 1) -> HvdVerifyInput:
    """By the code for this device, on a CPU."""
    num, step_drafts = len(plan.held), step_drafts_on(device, topk)
    batch: Any = SimpleNamespace(
        reqs=plan.held,
        seq_lens=torch.full((num,), 9),
        seq_lens_sum=9 * num,
        spec_info=SimpleNamespace(bonus_tokens=71 + torch.arange(num)),
    )
    sent = all_to_device(step_drafts.arrays(plan), "cpu")
    return step_drafts.lay_out(batch, plan, None, sent)


def has_branches(
    topk: int, num_cache: list[int], are_trees: list[bool], num_model: list[int]
) -> bool:
    """Of a step whose requests verify so many nodes of the cache and of the model drafter."""
    return laid_out(step_of(num_cache, are_trees, num_model), "cpu", topk).has_branches


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


@pytest.mark.parametrize(
    ("num_cache", "width"), [([3, 0, 2], WIDTH), ([0, 0, 0], WIDTH), ([0, 0, 0], 1)]
)
def test_a_device_lays_out_what_a_host_does(num_cache: list[int], width: int) -> None:
    plan = replace(step_of(num_cache, [False] * 3, [0] * 3), width=width)
    on_device, on_host = laid_out(plan, "cuda"), laid_out(plan, "cpu")
    assert on_device.num_nodes is not None
    assert on_device.num_nodes.tolist() == [1 + num for num in num_cache]
    links = "retrieve_index", "retrieve_next_token", "retrieve_next_sibling"
    for name in ("positions", "custom_mask", "num_nodes", *links):
        assert torch.equal(getattr(on_device, name), getattr(on_host, name))
    tokens = on_device.draft_token.view(3, width), on_host.draft_token.view(3, width)
    for row, num in enumerate(num_cache):
        assert tokens[0][row, : 1 + num].tolist() == tokens[1][row, : 1 + num].tolist()
        assert tokens[0][row, 0] == 71 + row


def test_a_device_is_sent_what_the_model_drafter_needs() -> None:
    arrays = step_drafts_on("cuda", 1).arrays(step_of([3, 0, 2], [False] * 3, [0, 2, 1]))
    assert arrays["drafting_rows"].tolist() == [1, 2]
    assert arrays["num_kept"].tolist() == [2, 1]
    assert step_drafts_on("cuda", 1).arrays(replace(step_of([0], [False], [0]), width=1)) == {}
