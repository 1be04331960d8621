"""An active request of the drafter, and the rows that a batch of requests has in arrays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_hvd.request_stats import RequestStats
from sglang_hvd.types import DraftPlans


@dataclass(slots=True, eq=False)
class DraftedRequest:
    """What the drafter knows of an active request.

    slot: the small number by which tracker, sources and allocator know the request.
    model_only: the request never verifies a draft that the host knows, only the model drafter's.
    num_tokens: tokens of the prompt and committed ones.
    plans, place: the planned batch and this request's row in it; plans is None between a commit and
        the next plan.
    """

    slot: int
    model_only: bool
    num_tokens: int
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


def are_model_only(requests: Sequence[DraftedRequest]) -> npt.NDArray[np.bool_] | None:
    """Which requests verify the model drafter's drafts only: bool[num_requests]; None if none."""
    model_only = [request.model_only for request in requests]
    return np.array(model_only) if any(model_only) else None
