"""What the model drafter's KV cache lacks of each request, kept until a draft-extend writes it.

Draft-extend needs the committed tokens, and the target's hidden states at the positions before
them. Where it is postponed (allocation/draft_extend.py), both are kept here. Then one forward runs
for several requests, over committed tokens only.

What a request lacks when it ends stays missing: at most MAX_POSTPONED_TOKENS and one verification.
A later request that reuses its prefix drafts a little worse: these KV slots hold what an earlier
owner left. The room for hidden states grows with what is missing (DraftExtend.max_missing) and
stays until `clear`: 24 KB for each token of an 8B model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_hvd._native import MissingPlaces

Ints = npt.NDArray[np.int64]

_FIRST_ROOM = 64  # tokens


class _Nodes(NamedTuple):
    """Copies of a verification's tokens and hidden states; the committed ones at the front of each
    request's nodes."""

    token_ids: torch.Tensor
    hidden_states: torch.Tensor


class MissingTokens:
    """Keeps what each request's draft KV cache lacks, in one array of tokens for all requests.

    `keep` follows each verification. Before the next, `settle` finds what was committed, and `take`
    what some requests lack; they only count. What they return goes to the device with all else that
    the step sends. Then `store` and `read` carry it out.

    Requests are known by their slots: their rows in SGLang's table of tokens. A request that gets a
    slot is prefilled first.

    max_tokens: the most missing tokens of all requests together that are expected
        (DraftExtend.max_missing). Up to this number the room doubles.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """Forgets everything: every request that goes on is prefilled first."""
        self._places = MissingPlaces()
        self._verified: _Nodes | None = None
        self._settled: _Nodes | None = None  # until `store`
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
        # Copies: another graph may write where they are.
        copied = _Nodes(token_ids.clone(), hidden_states.clone())
        self._places.keep(slots, cached_lens, len(token_ids) // len(slots))
        self._verified = copied

    def settle(self, slots: Ints, cached_lens: Ints) -> Ints:
        """Adds what was committed of the last verification to what is missing.

        Args:
            cached_lens: tokens in the KV cache of each of these requests now. What is kept of other
                requests is dropped: if they come back, a prefill writes it.

        Returns:
            int64[2 * num_tokens], which `store` needs: the places of what was committed, then its
            nodes in the verification.
        """
        assert self._settled is None, "what was settled is stored before the next step"
        places_and_nodes = self._places.settle(slots, cached_lens)
        self._settled, self._verified = self._verified, None
        return places_and_nodes

    def store(self, places_and_nodes: torch.Tensor) -> None:
        """Stores what was committed. places_and_nodes: what `settle` returned, on the device."""
        settled, self._settled = self._settled, None
        if settled is None or not len(places_and_nodes):
            return
        num_places = self._places.num_places
        room = 0 if self._token_ids is None else len(self._token_ids)
        if room < num_places:  # until max_tokens it doubles
            room = max(num_places, min(max(2 * room, _FIRST_ROOM), self._max_tokens))
            self._token_ids = _with_room(self._token_ids, room, settled.token_ids)
            self._hidden_states = _with_room(self._hidden_states, room, settled.hidden_states)
        assert self._token_ids is not None
        assert self._hidden_states is not None
        to, of = places_and_nodes.view(2, -1)
        self._token_ids.index_copy_(0, to, settled.token_ids.index_select(0, of))
        self._hidden_states.index_copy_(0, to, settled.hidden_states.index_select(0, of))

    def forget(self, slots: Ints) -> None:
        """A prefill wrote all of the draft KV cache of these requests."""
        self._places.forget(slots)

    def num_of(self, slots: Ints) -> Ints:
        """Tokens that the draft KV cache of each of these requests lacks; they were settled or
        forgotten."""
        return self._places.num_of(slots)

    def take(self, slots: Ints) -> Ints:
        """What these requests lack, each something, no longer counts as missing. Returns the places
        that `read` needs, those of one request after the other."""
        return self._places.take(slots)

    def read(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was taken, once it is stored: int[num_tokens], the token after each position, and
        [num_tokens, hidden_size], the target's hidden states at these positions.

        places: what `take` returned, on the device.
        """
        assert self._token_ids is not None
        assert self._hidden_states is not None
        # Copies: the places are used again.
        return self._token_ids.index_select(0, places), self._hidden_states.index_select(0, places)


def _with_room(values: torch.Tensor | None, room: int, like: torch.Tensor) -> torch.Tensor:
    """A copy with so many rows; more than it has."""
    if values is None:
        return like.new_empty((room, *like.shape[1:]))
    return torch.cat([values, values.new_empty((room - len(values), *values.shape[1:]))])
