"""An active request of the drafter, and the rows that a batch of requests has in arrays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_hvd.request_stats import RequestStats
from sglang_hvd.types import SOURCES, DraftLimits, DraftPlans

_CACHE, _MODEL = SOURCES.bit_of("cache"), SOURCES.bit_of("model")
_NO_LIMIT = 2**30  # more nodes than any verification has


@dataclass(slots=True, eq=False)
class DraftedRequest:
    """What the drafter knows of an active request.

    slot: the small number by which tracker, sources and allocator know the request.
    num_tokens: tokens of the prompt and committed ones.
    limits: None: it verifies what the policy chooses.
    teaches: the sources learn from its cycles.
    plans, place: the planned batch and this request's row in it; plans is None between a commit and
        the next plan.
    """

    slot: int
    num_tokens: int
    limits: DraftLimits | None = None
    teaches: bool = True
    plans: DraftPlans | None = None
    place: int = 0
    counts: RequestStats = field(default_factory=RequestStats)

    def end_cycle(self, source: str, num_accepted: int, num_tokens: int) -> None:
        """Counts a cycle; the next one has to be planned.

        num_accepted: accepted draft tokens. num_tokens: committed tokens, these included.
        """
        self.counts.add_cycle(source, num_accepted, num_tokens)
        self.num_tokens += num_tokens
        self.plans = None


def plans_of(requests: Sequence[DraftedRequest]) -> DraftPlans:
    """The plans to commit of one request or more; row i belongs to requests[i]."""
    batch, places = requests[0].plans, [request.place for request in requests]
    if batch is not None and all(request.plans is batch for request in requests):
        is_whole = len(batch) == len(places) and places == list(range(len(places)))
        return batch if is_whole else batch.select(places)
    parts = [r.plans.select([r.place]) for r in requests if r.plans is not None]
    assert len(parts) == len(requests), "a cycle must be planned before it is committed"
    return DraftPlans.concatenate(parts)


def slots_of(requests: Iterable[DraftedRequest]) -> npt.NDArray[np.int32]:
    """The slots of the requests: int32[num_requests]."""
    return np.array([request.slot for request in requests], np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class BatchLimits:
    """The limits of a batch in which some request has any. Row i belongs to request i.

    are_fixed: bool[num_requests]; these verify the drafts of their sources, whatever they gain.
    take_cache, take_model: bool[num_requests], of these requests.
    max_tokens: int32[num_requests], draft tokens of a cycle.
    """

    are_fixed: npt.NDArray[np.bool_]
    take_cache: npt.NDArray[np.bool_]
    take_model: npt.NDArray[np.bool_]
    max_tokens: npt.NDArray[np.int32]

    def max_chains(self, limit: int) -> npt.NDArray[np.int32]:
        """Longest cache draft of each request, where it is `limit` for others."""
        lens: npt.NDArray[np.int32] = np.minimum(self.max_tokens, limit)
        lens[self.are_fixed & ~self.take_cache] = 0
        return lens

    def max_branches(self, limit: int) -> npt.NDArray[np.int32]:
        """Nodes of each request's draft that may branch, where they are `limit` for others."""
        nodes: npt.NDArray[np.int32] = np.minimum(self.max_tokens, limit)
        nodes[self.are_fixed] = 0  # policy cache verifies chains
        return nodes


def limits_of(requests: Sequence[DraftedRequest]) -> BatchLimits | None:
    """The limits of the requests; None if no request has any."""
    limits = [request.limits for request in requests]
    if not any(limits):
        return None
    sources = [None if of is None else of.sources for of in limits]
    max_tokens = [
        _NO_LIMIT if of is None or of.max_tokens is None else min(of.max_tokens, _NO_LIMIT)
        for of in limits
    ]
    return BatchLimits(
        np.array([of is not None for of in sources]),
        np.array([of is not None and of & _CACHE > 0 for of in sources]),
        np.array([of is not None and of & _MODEL > 0 for of in sources]),
        np.array(max_tokens, np.int32),
    )
