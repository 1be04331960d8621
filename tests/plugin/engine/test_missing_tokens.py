"""Committed tokens and hidden states that wait until their request drafts."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from sglang_hvd.allocation import DraftExtend
from sglang_hvd.plugin.engine.catch_up import CatchUp
from sglang_hvd.plugin.engine.missing_tokens import Ints, MissingTokens
from tests.plugin.requests.served_requests import ServedRequests

WIDTH = 4


A, B, C = 5, 0, 70  # slots


def slots(*numbers: int) -> Ints:
    return np.array(numbers, np.int64)


def num_of(missing: MissingTokens, *numbers: int) -> list[int]:
    return missing.num_of(slots(*numbers)).tolist()


def settle(missing: MissingTokens, of: list[int], cached: list[int]) -> None:
    missing.settle(slots(*of), slots(*cached))


def committed(step: int, num_requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids step*100 + slot, and hidden states that name them."""
    token_ids = 100 * step + torch.arange(num_requests * WIDTH)
    return token_ids, token_ids[:, None].float() * torch.tensor([1.0, -1.0])


def verify(missing: MissingTokens, step: int, of: list[int], cached: list[int]) -> None:
    missing.keep(slots(*of), slots(*cached), *committed(step, len(of)))


def test_committed_tokens_wait_in_order_and_the_rest_is_dropped() -> None:
    missing = MissingTokens(64)
    verify(missing, 1, [A, B], [10, 20])
    settle(missing, [A, B], [12, 21])  # two and one were committed
    verify(missing, 2, [B, A], [21, 12])
    settle(missing, [B, A], [25, 13])
    assert num_of(missing, A, B) == [3, 5]
    tokens = missing.take(slots(B, A))
    assert tokens.lengths == [5, 3]
    assert tokens.token_ids.tolist() == [104, 200, 201, 202, 203, 100, 101, 204]
    assert tokens.hidden_states[:, 1].tolist() == [-float(t) for t in tokens.token_ids]
    assert num_of(missing, A, B) == [0, 0]


def test_a_prefill_leaves_nothing_missing() -> None:
    missing = MissingTokens(64)
    verify(missing, 1, [A], [10])
    settle(missing, [A], [13])
    missing.forget(slots(A))
    assert num_of(missing, A) == [0]
    missing.forget(slots(A))


def test_a_request_that_left_the_batch_is_not_kept() -> None:
    missing = MissingTokens(64)
    verify(missing, 1, [A, B], [10, 20])
    settle(missing, [B], [22])
    assert num_of(missing, A, B) == [0, 2]


def test_a_request_that_came_back_with_another_length_starts_again() -> None:
    missing = MissingTokens(64)
    verify(missing, 1, [A], [10])
    settle(missing, [A], [12])
    verify(missing, 2, [A], [12])
    settle(missing, [A], [40])
    assert num_of(missing, A) == [0]


@pytest.mark.parametrize("num_new", [1, 2, WIDTH, WIDTH + 1])
def test_a_request_that_was_prefilled_again_is_not_settled_from_before(num_new: int) -> None:
    missing = MissingTokens(64)
    verify(missing, 1, [A, B], [10, 20])
    missing.forget(slots(A))  # retracted, and prefilled with what it had
    settle(missing, [A, B], [10 + num_new, 21])
    assert num_of(missing, A, B) == [0, 1]


def test_what_waits_takes_no_more_memory_than_there_is_for_it() -> None:
    missing, cached = MissingTokens(100), [0, 0]
    for step in range(1, 60):  # at times B is away, and what waits of it is dropped
        at = [A, B] if step % 7 else [A]
        missing.keep(slots(*at), slots(*cached[: len(at)]), *committed(step, len(at)))
        for row in range(len(at)):
            cached[row] += 1 + (step + row) % WIDTH
        settle(missing, at, cached[: len(at)])
        if num_of(missing, *at)[0] > 40:
            missing.take(slots(*at))
    assert missing._hidden_states is not None
    assert 41 <= len(missing._hidden_states) <= 100
    assert len(missing._free) + sum(num_of(missing, A, B)) == len(missing._hidden_states)


def test_settling_twice_adds_nothing() -> None:
    missing = MissingTokens(64)
    verify(missing, 1, [A], [10])
    settle(missing, [A], [12])
    settle(missing, [A], [12])
    assert num_of(missing, A) == [2]


def test_a_run_of_single_tokens_waits_by_request() -> None:
    missing = MissingTokens(64)
    token_ids, hidden_states = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2)
    for step in range(1, 4):  # in the same memory, as a graph's outputs are
        token_ids[:] = 10 * step + torch.arange(2)
        hidden_states[:] = token_ids[:, None] * torch.tensor([1.0, -1.0])
        of = slots(A, B) if step < 3 else slots(B, C)  # A has ended, C has begun
        missing.keep(of, slots(100 * step, 100 * step), token_ids, hidden_states)
        if step == 1:
            settle(missing, [A, B], [101, 101])
        if step == 2:
            settle(missing, [B], [201])
    settle(missing, [C, B], [301, 301])
    assert num_of(missing, A, B, C) == [0, 3, 1]
    tokens = missing.take(slots(C, B))
    assert tokens.lengths == [1, 3]
    assert tokens.token_ids.tolist() == [31, 11, 21, 30]
    assert tokens.hidden_states[:, 1].tolist() == [-31, -11, -21, -30]


def test_a_flush_leaves_no_copies() -> None:
    served, nothing = ServedRequests(), None
    catch_up = CatchUp(
        nothing,  # type: ignore[arg-type]
        DraftExtend.WHEN_DRAFTING,
        max_nodes=8,
        costs=nothing,  # type: ignore[arg-type]
        clock=nothing,  # type: ignore[arg-type]
    )
    served.catch_up, missing = catch_up, catch_up._missing
    verify(missing, 1, [A, B], [10, 20])
    settle(missing, [A, B], [11, 24])
    verify(missing, 2, [A, B], [11, 24])
    assert missing._verified is not None
    assert missing._hidden_states is not None
    copies = [weakref.ref(missing._verified.hidden_states), weakref.ref(missing._hidden_states)]
    served.worker().clear_cache_pool()
    gc.collect()
    assert [copy() for copy in copies] == [None] * 2
    assert len(missing._free) == len(missing._num) == 0


def test_nothing_waits_where_draft_extend_follows_every_step() -> None:
    nothing: Any = None
    catch_up = CatchUp(nothing, DraftExtend.EVERY_STEP, max_nodes=8, costs=nothing, clock=nothing)
    assert catch_up.due_rows([nothing], nothing) == []
    catch_up.keep([nothing], nothing, nothing)
    assert catch_up._missing._verified is None
    catch_up.forget([nothing])
