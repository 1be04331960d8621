"""What is reported of a cycle, by a server to a request that asks, and by replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from sglang_hvd.types import MATCH_COLUMNS, DraftPlans, HostDrafts, MatchOrigin
from sglang_hvd.view.cycles import Cycle, CycleSource, Origin

_COLUMNS = [MATCH_COLUMNS.index(name) for name in ("match_len", "num_tokens", "origin")]


def cycle_of(
    plans: DraftPlans,
    row: int,
    committed: Sequence[int],
    num_model_accepted: int,
    *,
    source: str,
    at: int,
    width: int,
    num_requests: int,
    ms: float | None,
    ran_ahead: bool = False,
    tells_shared: bool = True,
) -> Cycle:
    """The cycle of the request in this row of a step.

    committed: the tokens that it committed, the bonus token included.
    num_model_accepted: tokens of the model drafter's draft that were right; below 0 if not known.
    source, at, width, ms, ran_ahead: see Cycle.
    tells_shared: False: the report is the same with a draft from another request that was not
        verified as without one, since it would tell what that request received.
    """
    num_accepted = len(committed) - 1
    match_len, num_found, origin = plans.drafts.matches[row, _COLUMNS].astype(int).tolist()
    num_cache, num_model = int(plans.drafts.num_nodes[row]), int(plans.num_model_nodes[row])
    is_hidden = not tells_shared and not num_cache and origin == MatchOrigin.SHARED
    if is_hidden:
        num_found = 0
    cache_right = model_right = None
    if num_cache:
        cache_right = _num_right(plans.drafts, row, committed[:num_accepted])
    if num_model:
        model_right = num_accepted if num_model_accepted < 0 else num_model_accepted
    gains = plans.expected
    return Cycle(
        at=at,
        source=cast(CycleSource, source),
        origin=cast(Origin, MatchOrigin(origin).name.lower()) if num_found else None,
        match=match_len if num_found else None,
        found=num_found,
        cache=num_cache,
        model=num_model,
        steps=int(plans.model_steps[row]) if num_model else 0,
        accepted=num_accepted,
        cache_right=cache_right,
        model_right=model_right,
        expected=None if gains is None else _number(gains.verified, row),
        if_cache=None if gains is None or is_hidden else _number(gains.cache, row),
        if_model=None if gains is None else _number(gains.model, row),
        if_both=None if gains is None or is_hidden else _number(gains.both, row),
        width=width,
        requests=num_requests,
        ms=None if ms is None else round(ms, 3),
        ran_ahead=ran_ahead,
    )


def _num_right(drafts: HostDrafts, row: int, token_ids: Sequence[int]) -> int:
    """How many of these tokens, from the first one on, are a path of the draft."""
    num_nodes = int(drafts.num_nodes[row])
    pairs = zip(
        drafts.parents[row, :num_nodes].tolist(),
        drafts.token_ids[row, :num_nodes].tolist(),
        strict=True,
    )
    place_of = {pair: place for place, pair in enumerate(pairs)}
    place = -1
    for depth, token_id in enumerate(token_ids):
        found = place_of.get((place, token_id))
        if found is None:
            return depth
        place = found
    return len(token_ids)


def _number(gains: npt.NDArray[np.float32], row: int) -> float | None:
    """Three decimals are plenty for people to read."""
    return None if np.isnan(gains[row]) else round(float(gains[row]), 3)
