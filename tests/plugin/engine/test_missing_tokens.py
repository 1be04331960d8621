"""Committed tokens and hidden states that wait until their request drafts."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from sglang_hvd.allocation import DraftExtend
from sglang_hvd.plugin.engine.catch_up import CatchUp
from sglang_hvd.plugin.engine.missing_tokens import MissingTokens
from tests.plugin.requests.served_requests import ServedRequests

WIDTH = 4


class Req:
    """Stands for a request: all that matters is which one it is."""


def committed(step: int, num_requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids step*100 + slot, and hidden states that name them."""
    token_ids = 100 * step + torch.arange(num_requests * WIDTH)
    return token_ids, token_ids[:, None].float() * torch.tensor([1.0, -1.0])


def verify(missing: MissingTokens, step: int, reqs: list[Any], cached: list[int]) -> None:
    missing.keep(reqs, cached, *committed(step, len(reqs)))


def test_committed_tokens_wait_in_order_and_the_rest_is_dropped() -> None:
    missing, a, b = MissingTokens(), Req(), Req()
    verify(missing, 1, [a, b], [10, 20])
    missing.settle([a, b], [12, 21])  # two and one were committed
    verify(missing, 2, [b, a], [21, 12])
    missing.settle([b, a], [25, 13])
    assert (missing.num_of(a), missing.num_of(b)) == (3, 5)
    tokens = missing.take([b, a])
    assert tokens.lengths == [5, 3]
    assert tokens.token_ids.tolist() == [104, 200, 201, 202, 203, 100, 101, 204]
    assert tokens.hidden_states[:, 1].tolist() == [-float(t) for t in tokens.token_ids]
    assert missing.num_of(a) == missing.num_of(b) == 0


def test_a_prefill_leaves_nothing_missing() -> None:
    missing, a = MissingTokens(), Req()
    verify(missing, 1, [a], [10])
    missing.settle([a], [13])
    missing.forget(a)
    assert missing.num_of(a) == 0
    missing.forget(a)


def test_a_request_that_left_the_batch_is_not_kept() -> None:
    missing, a, b = MissingTokens(), Req(), Req()
    verify(missing, 1, [a, b], [10, 20])
    del a
    gc.collect()
    missing.settle([b], [22])
    assert missing.num_of(b) == 2
    assert len(missing._of_request) == 1


def test_a_request_that_came_back_with_another_length_starts_again() -> None:
    missing, a = MissingTokens(), Req()
    verify(missing, 1, [a], [10])
    missing.settle([a], [12])
    verify(missing, 2, [a], [12])
    missing.settle([a], [40])
    assert missing.num_of(a) == 0


@pytest.mark.parametrize("num_new", [1, 2, WIDTH, WIDTH + 1])
def test_a_request_that_was_prefilled_again_is_not_settled_from_before(num_new: int) -> None:
    missing, a, b = MissingTokens(), Req(), Req()
    verify(missing, 1, [a, b], [10, 20])
    missing.forget(a)  # retracted, and prefilled with what it had
    missing.settle([a, b], [10 + num_new, 21])
    assert (missing.num_of(a), missing.num_of(b)) == (0, 1)


def test_what_waits_takes_its_own_memory_only_and_not_for_requests_that_left() -> None:
    missing, a, b = MissingTokens(), Req(), Req()
    verify(missing, 1, [a, b], [10, 20])
    missing.settle([a, b], [11, 24])
    assert len(missing._of_request) == 2
    missing.settle([a], [11])  # b waits to be prefilled again
    assert len(missing._of_request) == 1
    tokens = missing._of_request[a].hidden_states[0]
    assert tokens.untyped_storage().nbytes() == tokens.numel() * tokens.element_size()


def test_settling_twice_adds_nothing() -> None:
    missing, a = MissingTokens(), Req()
    verify(missing, 1, [a], [10])
    missing.settle([a], [12])
    missing.settle([a], [12])
    assert missing.num_of(a) == 2


@pytest.mark.parametrize("in_runs", [False, True])
def test_a_run_of_single_tokens_waits_by_request(in_runs: bool) -> None:
    missing = MissingTokens(in_runs=in_runs)
    a, b, c = Req(), Req(), Req()
    token_ids, hidden_states = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2)
    for step in range(1, 4):  # in the same memory, as a graph's outputs are
        token_ids[:] = 10 * step + torch.arange(2)
        hidden_states[:] = token_ids[:, None] * torch.tensor([1.0, -1.0])
        reqs = [a, b] if step < 3 else [b, c]  # a has ended, c has begun
        missing.keep(reqs, [100 * step, 100 * step], token_ids, hidden_states)
        if step == 1:
            missing.settle([a, b], [101, 101])
        if step == 2:
            missing.settle([b], [201])
    missing.settle([c, b], [301, 301])
    assert [missing.num_of(req) for req in (a, b, c)] == [0, 3, 1]
    tokens = missing.take([c, b])
    assert tokens.lengths == [1, 3]
    assert tokens.token_ids.tolist() == [31, 11, 21, 30]
    assert tokens.hidden_states[:, 1].tolist() == [-31, -11, -21, -30]


def test_a_flush_leaves_no_copies() -> None:
    served, nothing = ServedRequests(), None
    catch_up = CatchUp(nothing, DraftExtend.WHEN_DRAFTING, costs=nothing, clock=nothing)  # type: ignore[arg-type]
    served.catch_up = catch_up
    reqs = [Req(), Req()]
    verify(catch_up._missing, 1, reqs, [10, 20])
    catch_up._missing.settle(reqs, [11, 24])
    verify(catch_up._missing, 2, reqs, [11, 24])
    verified = catch_up._missing._verified
    assert verified is not None
    copies = [weakref.ref(verified.hidden_states)]
    copies += [weakref.ref(m.hidden_states[0]) for m in catch_up._missing._of_request.values()]
    del verified
    served.worker().clear_cache_pool()
    gc.collect()
    assert [copy() for copy in copies] == [None] * 3


def test_nothing_waits_where_draft_extend_follows_every_step() -> None:
    nothing: Any = None
    catch_up = CatchUp(nothing, DraftExtend.EVERY_STEP, costs=nothing, clock=nothing)
    assert catch_up.due_rows([Req()], nothing) == []  # type: ignore[list-item]
    catch_up.keep([Req()], nothing, nothing)  # type: ignore[list-item]
    assert catch_up._missing._verified is None
