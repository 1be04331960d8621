"""What the model drafter's KV cache lacks of each request, kept until a draft-extend writes it.

Draft-extend needs the committed tokens, and the target's hidden states at the positions before
them. Where it is postponed (allocation/draft_extend.py), both are kept here. Then one forward runs
for several requests, over committed tokens only.

What a request lacks when it ends stays missing: at most MAX_POSTPONED_TOKENS and one verification.
A later turn that finds its tokens in the prefix cache drafts a little worse, with what an earlier
owner left in these slots. The room for hidden states grows to as many tokens and stays until all is
forgotten: 24 KB for each token of an 8B model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

_FIRST_ROOM = 64  # tokens
_NOTHING: Ints = np.zeros((2, 0), np.int64)


@dataclass(frozen=True, slots=True)
class _Verified:
    """The last verification. How much of it was committed is not known yet.

    slots: of its requests.
    cached_lens: tokens in the KV cache of each request before it; -1: the request was prefilled
        again in between.
    token_ids: int[num_requests * width]; the committed ones at the front of each row.
    hidden_states: [num_requests * width, hidden_size]; rows as those of token_ids.
    """

    slots: Ints
    cached_lens: Ints
    token_ids: torch.Tensor
    hidden_states: torch.Tensor


class MissingTokens:
    """Keeps what each request's draft KV cache lacks, in one array of tokens for all requests.

    `keep` follows each verification. Before the next, `settle` finds what was committed, and `take`
    what some requests lack; they only count. What they return goes to the device with all else that
    the step sends. Then `move` and `read` carry it out.

    Requests are known by their slots: their rows in SGLang's table of tokens. A request that gets a
    slot is prefilled first.

    max_tokens: the most tokens of all requests together that are missing, if their number stays
        within DraftExtend.max_missing.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """Forgets everything: every request that goes on is prefilled first."""
        self._verified: _Verified | None = None
        self._settled: _Verified | None = None  # until it is moved
        self._num = np.zeros(0, np.int64)  # by slot
        self._places = np.zeros((0, 0), np.int64)  # by slot: of its tokens, in order
        self._free = np.zeros(0, np.int64)  # places that hold nothing
        # By place.
        self._token_ids: torch.Tensor | None = None
        self._hidden_states: torch.Tensor | None = None

    def keep(
        self,
        slots: Ints,
        cached_lens: Ints,
        token_ids: torch.Tensor,
        hidden_states: torch.Tensor,
    ) -> None:
        """Keeps a verification until `settle` says how much of it was committed.

        cached_lens: tokens in the KV cache of each request before it.
        token_ids, hidden_states: one row for each node; the committed ones at the front of each
            request's nodes.
        """
        self._reserve(slots)
        # Copies: another graph may write where they are.
        self._verified = _Verified(
            slots, cached_lens.copy(), token_ids.clone(), hidden_states.clone()
        )

    def settle(self, slots: Ints, cached_lens: Ints) -> Ints:
        """Adds what was committed of the last verification to what is missing.

        Args:
            cached_lens: tokens in the KV cache of each of these requests now. What is kept of other
                requests is dropped: if they come back, a prefill writes it.

        Returns:
            int64[2, num_tokens], which `move` needs: the places of what was committed, and its
            nodes in the verification.
        """
        verified, self._verified = self._verified, None
        self._reserve(slots)
        now = np.full(len(self._num), -1)
        now[slots] = cached_lens
        is_left = (self._num > 0) & (now < 0)
        if is_left.any():
            self._drop(np.flatnonzero(is_left))
        if verified is None:
            return _NOTHING
        width = len(verified.token_ids) // len(verified.slots)
        after = now[verified.slots]
        num_new = after - verified.cached_lens
        is_right = (num_new > 0) & (num_new <= width)
        is_known = np.minimum(after, verified.cached_lens) >= 0
        rows = np.flatnonzero(is_known & is_right)
        if len(rows) < len(after):  # some left, or were not what was verified
            self._drop(verified.slots.compress(is_known & ~is_right))
        if not len(rows):
            return _NOTHING
        self._settled = verified
        return self._add(verified, rows, num_new[rows], rows * width)

    def move(self, places_and_nodes: torch.Tensor) -> None:
        """Keeps what was committed. places_and_nodes: what `settle` returned, on the device."""
        verified, self._settled = self._settled, None
        if verified is None:
            return
        assert self._token_ids is not None
        assert self._hidden_states is not None
        to, of = places_and_nodes
        self._token_ids.index_copy_(0, to, verified.token_ids.index_select(0, of))
        self._hidden_states.index_copy_(0, to, verified.hidden_states.index_select(0, of))

    def forget(self, slots: Ints) -> None:
        """A prefill wrote all of the draft KV cache of these requests."""
        self._reserve(slots)
        self._drop(slots)
        if self._verified is not None:
            self._verified.cached_lens[np.isin(self._verified.slots, slots)] = -1

    def num_of(self, slots: Ints) -> Ints:
        """Tokens that the draft KV cache of each of these requests lacks; they were settled or
        forgotten."""
        return self._num[slots]

    def take(self, slots: Ints) -> Ints:
        """What these requests lack, each something, no longer counts as missing. Returns the places
        that `read` needs, those of one request after the other."""
        return self._drop(slots)

    def read(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was taken, once it is moved: int[num_tokens], the token after each position, and
        [num_tokens, hidden_size], the target's hidden states at these positions.

        places: what `take` returned, on the device.
        """
        assert self._token_ids is not None
        assert self._hidden_states is not None
        # Copies: the places are used again.
        return self._token_ids.index_select(0, places), self._hidden_states.index_select(0, places)

    def _add(self, verified: _Verified, rows: Ints, lengths: Ints, starts: Ints) -> Ints:
        """starts: first node of each of these rows of the verification. Returns the places of all
        tokens, and their nodes."""
        slots, num_new = verified.slots[rows], int(lengths.sum())
        nodes, before = ranges(starts, lengths), self._num[slots]
        most, room_of_slot = int((before + lengths).max()), self._places.shape[1]
        if most > room_of_slot:
            more = max(2 * room_of_slot, most) - room_of_slot
            self._places = np.pad(self._places, ((0, 0), (0, more)))
        if len(self._free) < num_new:
            self._grow(num_new, verified)
        places, self._free = self._free[-num_new:], self._free[:-num_new]
        self._places[slots.repeat(lengths), ranges(before, lengths)] = places
        self._num[slots] += lengths
        return np.stack([places, nodes])

    def _drop(self, slots: Ints) -> Ints:
        """These requests lack nothing any more. Returns the places of what they lacked, in order,
        which are free now."""
        num = self._num[slots]
        places = self._places[slots.repeat(num), ranges(np.zeros_like(num), num)]
        self._num[slots] = 0
        self._free = np.concatenate([self._free, places])
        return places

    def _reserve(self, slots: Ints) -> None:
        """Makes the tables large enough for these slots."""
        num, last = len(self._num), int(slots.max())
        if last >= num:
            more = max(2 * num, last + 1) - num
            self._num = np.pad(self._num, (0, more))
            self._places = np.pad(self._places, ((0, more), (0, 0)))

    def _grow(self, num_new: int, like: _Verified) -> None:
        """Makes room for so many more tokens. Until max_tokens the room doubles."""
        room = 0 if self._token_ids is None else len(self._token_ids)
        needed = room - len(self._free) + num_new
        more = max(needed, min(max(2 * room, _FIRST_ROOM), self._max_tokens)) - room
        self._free = np.concatenate([self._free, np.arange(room, room + more)])
        self._token_ids = _longer(self._token_ids, like.token_ids, more)
        self._hidden_states = _longer(self._hidden_states, like.hidden_states, more)


def _longer(values: torch.Tensor | None, like: torch.Tensor, more: int) -> torch.Tensor:
    added = like.new_empty((more, *like.shape[1:]))
    return added if values is None else torch.cat([values, added])


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """The numbers from each start on, as many as its length, one range after the other."""
    ends = lengths.cumsum()
    return (starts - ends + lengths).repeat(lengths) + np.arange(lengths.sum())
