"""Committed tokens and hidden states that wait until their request drafts."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hvd.allocation import DraftExtend
from sglang_hvd.plugin.engine.catch_up import CatchUp
from sglang_hvd.plugin.engine.postponed_extend import PostponedExtend
from sglang_hvd.plugin.engine.worker import HvdWorker

WIDTH = 4


class Req:
    """Stands for a request: all that matters is which one it is."""


def verified(step: int, num_requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids step*100 + slot, and hidden states that name them."""
    token_ids = 100 * step + torch.arange(num_requests * WIDTH)
    return token_ids, token_ids[:, None].float() * torch.tensor([1.0, -1.0])


def see(postponed: PostponedExtend, step: int, reqs: list[Any], cached: list[int]) -> None:
    postponed.see(reqs, cached, *verified(step, len(reqs)))


def test_committed_tokens_wait_in_order_and_the_rest_is_dropped() -> None:
    postponed, a, b = PostponedExtend(), Req(), Req()
    see(postponed, 1, [a, b], [10, 20])
    postponed.settle([a, b], [12, 21])  # two and one were committed
    see(postponed, 2, [b, a], [21, 12])
    postponed.settle([b, a], [25, 13])
    assert (postponed.num_missing(a), postponed.num_missing(b)) == (3, 5)
    tokens = postponed.take([b, a])
    assert tokens.lengths == [5, 3]
    assert tokens.token_ids.tolist() == [104, 200, 201, 202, 203, 100, 101, 204]
    assert tokens.hidden_states[:, 1].tolist() == [-float(t) for t in tokens.token_ids]
    assert postponed.num_missing(a) == postponed.num_missing(b) == 0


def test_a_prefill_leaves_nothing_missing() -> None:
    postponed, a = PostponedExtend(), Req()
    see(postponed, 1, [a], [10])
    postponed.settle([a], [13])
    postponed.forget(a)
    assert postponed.num_missing(a) == 0
    postponed.forget(a)


def test_a_request_that_left_the_batch_is_not_kept() -> None:
    postponed, a, b = PostponedExtend(), Req(), Req()
    see(postponed, 1, [a, b], [10, 20])
    del a
    gc.collect()
    postponed.settle([b], [22])
    assert postponed.num_missing(b) == 2
    assert len(postponed._missing) == 1


def test_a_request_that_came_back_with_another_length_starts_anew() -> None:
    postponed, a = PostponedExtend(), Req()
    see(postponed, 1, [a], [10])
    postponed.settle([a], [12])
    see(postponed, 2, [a], [12])
    postponed.settle([a], [40])
    assert postponed.num_missing(a) == 0


@pytest.mark.parametrize("num_new", [1, 2, WIDTH, WIDTH + 1])
def test_a_request_that_was_prefilled_again_is_not_settled_from_before(num_new: int) -> None:
    postponed, a, b = PostponedExtend(), Req(), Req()
    see(postponed, 1, [a, b], [10, 20])
    postponed.forget(a)  # retracted, and prefilled with what it had
    postponed.settle([a, b], [10 + num_new, 21])
    assert (postponed.num_missing(a), postponed.num_missing(b)) == (0, 1)


def test_what_waits_takes_its_own_memory_only_and_not_for_requests_that_left() -> None:
    postponed, a, b = PostponedExtend(), Req(), Req()
    see(postponed, 1, [a, b], [10, 20])
    postponed.settle([a, b], [11, 24])
    assert len(postponed._missing) == 2
    postponed.settle([a], [11])  # b waits to be prefilled again
    assert len(postponed._missing) == 1
    tokens = postponed._missing[a].hidden_states[0]
    assert tokens.untyped_storage().nbytes() == tokens.numel() * tokens.element_size()


def test_settling_twice_adds_nothing() -> None:
    postponed, a = PostponedExtend(), Req()
    see(postponed, 1, [a], [10])
    postponed.settle([a], [12])
    postponed.settle([a], [12])
    assert postponed.num_missing(a) == 2


@pytest.mark.parametrize("in_runs", [False, True])
def test_a_run_of_single_tokens_waits_by_request(in_runs: bool) -> None:
    postponed = PostponedExtend(in_runs=in_runs)
    a, b, c = Req(), Req(), Req()
    token_ids, hidden_states = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2)
    for step in range(1, 4):  # in the same memory, as a graph's outputs are
        token_ids[:] = 10 * step + torch.arange(2)
        hidden_states[:] = token_ids[:, None] * torch.tensor([1.0, -1.0])
        reqs = [a, b] if step < 3 else [b, c]  # a has ended, c has begun
        postponed.see(reqs, [100 * step, 100 * step], token_ids, hidden_states)
        if step == 1:
            postponed.settle([a, b], [101, 101])
        if step == 2:
            postponed.settle([b], [201])
    postponed.settle([c, b], [301, 301])
    assert [postponed.num_missing(req) for req in (a, b, c)] == [0, 3, 1]
    tokens = postponed.take([c, b])
    assert tokens.lengths == [1, 3]
    assert tokens.token_ids.tolist() == [31, 11, 21, 30]
    assert tokens.hidden_states[:, 1].tolist() == [-31, -11, -21, -30]


def test_a_flush_leaves_no_copies() -> None:
    catch_up = CatchUp(None, DraftExtend.WHEN_DRAFTING)  # type: ignore[arg-type]
    worker = HvdWorker.__new__(HvdWorker)
    worker._held = SimpleNamespace(flush=lambda: None)  # type: ignore[assignment]
    worker._draft_worker = SimpleNamespace(catch_up=catch_up)
    reqs = [Req(), Req()]
    see(catch_up._postponed, 1, reqs, [10, 20])
    catch_up._postponed.settle(reqs, [11, 24])
    see(catch_up._postponed, 2, reqs, [11, 24])
    verified = catch_up._postponed._verified
    assert verified is not None
    copies = [weakref.ref(verified.hidden_states)]
    copies += [weakref.ref(m.hidden_states[0]) for m in catch_up._postponed._missing.values()]
    del verified
    worker.clear_cache_pool()
    gc.collect()
    assert [copy() for copy in copies] == [None] * 3
    worker._draft_worker.catch_up = None  # draft-extend follows every step
    worker.clear_cache_pool()
