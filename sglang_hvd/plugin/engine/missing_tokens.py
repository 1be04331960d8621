"""What the model drafter's KV cache lacks of each request, kept until a draft-extend writes it.

Draft-extend needs the committed tokens, and the target's hidden states at the positions before
them. Where it is postponed (allocation/draft_extend.py), both are kept here. Then one forward runs
for several requests, over committed tokens only.

What a request lacks when it ends stays missing: at most MAX_POSTPONED_TOKENS and one verification.
A later turn that finds its tokens in the prefix cache drafts a little worse, with what an earlier
owner left in these slots. The hidden states kept are as many: 24 KB for each token of an 8B model.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_hvd.plugin.device.host_transfer import to_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(slots=True, eq=False)
class _OfRequest:
    """What the draft KV cache lacks of one request.

    token_ids: int64[num_tokens] each, the token after each position.
    hidden_states: [num_tokens, hidden_size] each, the target's at these positions.
    """

    num_tokens: int = 0
    token_ids: list[torch.Tensor] = field(default_factory=list)
    hidden_states: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Verified:
    """The last verification. How much of it was committed is not known yet.

    reqs: weak references, since some requests may end before the next step. None: the request was
        prefilled again in between.
    cached_lens: tokens in the KV cache of each request before it.
    token_ids: int64[num_requests * width]; the committed ones at the front of each row.
    hidden_states: [num_requests * width, hidden_size]; rows as those of token_ids.
    """

    reqs: list[weakref.ref[Req] | None]
    cached_lens: list[int]
    token_ids: torch.Tensor
    hidden_states: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokensToWrite:
    """What some requests lack, one request after the other.

    lengths: tokens of each request, at least 1.
    token_ids, hidden_states: those of _OfRequest, of all requests.
    """

    lengths: list[int]
    token_ids: torch.Tensor
    hidden_states: torch.Tensor


class MissingTokens:
    """Keeps what each request's draft KV cache lacks.

    `keep` follows each verification; `settle` comes before the next.

    in_runs: all requests of a batch catch up together, so that no request keeps what others lack.
    """

    _of_request: weakref.WeakKeyDictionary[Req, _OfRequest]

    def __init__(self, *, in_runs: bool = False) -> None:
        self._split = torch.split if in_runs else _split
        self._of_request = weakref.WeakKeyDictionary()
        self._verified: _Verified | None = None

    def keep(
        self,
        reqs: Sequence[Req],
        cached_lens: Sequence[int],
        token_ids: torch.Tensor,
        hidden_states: torch.Tensor,
    ) -> None:
        """Keeps a verification until `settle` says how much of it was committed.

        cached_lens: tokens in the KV cache of each request before it.
        token_ids, hidden_states: one row for each slot; the committed ones at the front of each
            request's slots.
        """
        # Copies: another graph may write where they are.
        self._verified = _Verified(
            [weakref.ref(req) for req in reqs],
            list(cached_lens),
            token_ids.clone(),
            hidden_states.clone(),
        )

    def settle(self, reqs: Sequence[Req], cached_lens: Sequence[int]) -> None:
        """Adds what was committed of the last verification to what is missing.

        cached_lens: tokens in the KV cache of each of these requests now. What is kept of other
            requests is dropped: if they come back, a prefill writes it.
        """
        verified, self._verified = self._verified, None
        now = dict(zip(map(id, reqs), cached_lens, strict=True))
        for req in [req for req in self._of_request if id(req) not in now]:
            del self._of_request[req]
        if verified is None:
            return
        width = len(verified.token_ids) // len(verified.reqs)
        found: list[tuple[Req, int]] = []
        slots: list[range] = []
        for row, (ref, before) in enumerate(zip(verified.reqs, verified.cached_lens, strict=True)):
            req = None if ref is None else ref()
            if req is None or id(req) not in now:
                continue
            num_new = now[id(req)] - before
            if not 0 < num_new <= width:  # not what was verified: the drafter's tokens were wrong
                self.forget(req)
                continue
            found.append((req, num_new))
            slots.append(range(row * width, row * width + num_new))
        if not found:
            return
        token_ids, hidden_states = verified.token_ids, verified.hidden_states
        places = np.fromiter(itertools.chain.from_iterable(slots), np.int64)
        if len(places) < len(token_ids):  # the other slots need not stay
            on_device = to_device(places, token_ids.device.type)
            token_ids, hidden_states = token_ids[on_device], hidden_states[on_device]
        lengths = [num_new for _, num_new in found]
        pieces = zip(
            self._split(token_ids, lengths), self._split(hidden_states, lengths), strict=True
        )
        for (req, num_new), (token_ids, hidden_states) in zip(found, pieces, strict=True):
            missing = self._of_request.setdefault(req, _OfRequest())
            missing.num_tokens += num_new
            missing.token_ids.append(token_ids)
            missing.hidden_states.append(hidden_states)

    def forget(self, req: Req) -> None:
        """A prefill wrote all of the request's draft KV cache."""
        self._of_request.pop(req, None)
        if self._verified is not None:
            verified = self._verified.reqs
            for row, ref in enumerate(verified):
                if ref is not None and ref() is req:
                    verified[row] = None

    def clear(self) -> None:
        """Forgets everything: every request that goes on is prefilled first."""
        self._of_request.clear()
        self._verified = None

    def num_of(self, req: Req) -> int:
        """Tokens that the request's draft KV cache lacks."""
        missing = self._of_request.get(req)
        return 0 if missing is None else missing.num_tokens

    def take(self, reqs: Sequence[Req]) -> TokensToWrite:
        """What these requests lack, each something. It no longer counts as missing."""
        missing = [self._of_request.pop(req) for req in reqs]
        return TokensToWrite(
            [of_req.num_tokens for of_req in missing],
            torch.cat([piece for of_req in missing for piece in of_req.token_ids]),
            torch.cat([piece for of_req in missing for piece in of_req.hidden_states]),
        )


def _split(values: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """Each request's part in memory of its own: a view would keep that of the whole batch. On a GPU
    this is one kernel, where copies would be one for each request."""
    parts = [values.new_empty((num, *values.shape[1:])) for num in lengths]
    torch.split_with_sizes_copy(values, lengths, out=parts)
    return parts
