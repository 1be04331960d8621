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
    missing.store(torch.from_numpy(missing.settle(slots(*of), slots(*cached))))


def take(missing: MissingTokens, *of: int) -> tuple[list[int], torch.Tensor]:
    """Token ids and hidden states."""
    token_ids, hidden_states = missing.read(torch.from_numpy(missing.take(slots(*of))))
    return token_ids.tolist(), hidden_states


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
    token_ids, hidden_states = take(missing, B, A)
    assert token_ids == [104, 200, 201, 202, 203, 100, 101, 204]
    assert hidden_states[:, 1].tolist() == [-float(t) for t in token_ids]
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
            take(missing, *at)
    assert missing._hidden_states is not None
    assert 41 <= len(missing._hidden_states) <= 100
    # Every place is used again.
    take(missing, A, B)
    places = missing._places.num_places
    missing.forget(slots(A))
    for num in [WIDTH] * (places // WIDTH) + [places % WIDTH or WIDTH]:
        assert missing._places.num_places == places
        verify(missing, 60, [A], cached[:1])
        cached[0] += num
        settle(missing, [A], cached[:1])
    grown = 0 if places % WIDTH else WIDTH
    assert missing._places.num_places == num_of(missing, A)[0] == places + grown


def test_bad_slots_and_lengths_change_nothing() -> None:
    missing = MissingTokens(64)
    verify(missing, 1, [A, B], [10, 20])
    with pytest.raises(ValueError, match="slot -3 is negative"):
        verify(missing, 2, [A, -3], [10, 20])
    with pytest.raises(ValueError, match="one length for each slot"):
        settle(missing, [A, B], [12])
    settle(missing, [A, B], [12, 21])
    assert take(missing, A, B)[0] == [100, 101, 104]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_calls_keeps_what_a_list_for_each_request_would(seed: int) -> None:
    random, missing = np.random.default_rng(seed), MissingTokens(400)
    lacks: dict[int, list[int]] = {}  # by slot: the tokens, in order
    cached = dict.fromkeys(range(12), 0)
    for step in range(1, 80):
        batch = random.permutation(12)[: random.integers(1, 9)].tolist()
        for slot in batch:
            if random.random() < 0.1:  # prefilled, with whatever it has
                missing.forget(slots(slot))
                lacks[slot] = []
        verify(missing, step, batch, [cached[slot] for slot in batch])
        token_ids = committed(step, len(batch))[0].view(-1, WIDTH).tolist()
        again = {slot for slot in batch if random.random() < 0.05}
        for slot in again:
            missing.forget(slots(slot))
            lacks[slot] = []
        stay = [slot for slot in batch if random.random() < 0.9] or batch
        for row, slot in enumerate(batch):
            num_new = int(random.integers(1, WIDTH + 1))
            if random.random() < 0.05:  # another length than any verification gives
                lacks[slot], num_new = [], WIDTH + 1
            elif slot not in again:
                lacks.setdefault(slot, []).extend(token_ids[row][:num_new])
            cached[slot] += num_new
        joined = [slot for slot in range(12) if slot not in batch and random.random() < 0.2]
        now = [*stay, *joined]
        random.shuffle(now)
        settle(missing, now, [cached[slot] for slot in now])
        lacks = {slot: of for slot, of in lacks.items() if slot in now}
        assert num_of(missing, *now) == [len(lacks.get(slot, [])) for slot in now]
        due = [slot for slot in now if lacks.get(slot) and random.random() < 0.4]
        if due:
            found, hidden_states = take(missing, *due)
            assert found == [token for slot in due for token in lacks.pop(slot)]
            assert hidden_states[:, 1].tolist() == [-float(token) for token in found]


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
    token_ids, hidden_states = take(missing, C, B)
    assert token_ids == [31, 11, 21, 30]
    assert hidden_states[:, 1].tolist() == [-31, -11, -21, -30]


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
    assert missing._places.num_places == 0
    assert num_of(missing, A, B) == [0, 0]


def test_nothing_waits_where_draft_extend_follows_every_step() -> None:
    nothing: Any = None
    catch_up = CatchUp(nothing, DraftExtend.EVERY_STEP, max_nodes=8, costs=nothing, clock=nothing)
    due = catch_up.due(nothing)
    assert (due.rows, due.arrays) == ([], {})
    catch_up.store({})
    catch_up.keep(nothing, nothing)
    assert catch_up._missing._verified is None
    catch_up.forget([nothing])
