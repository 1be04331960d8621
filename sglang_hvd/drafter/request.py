"""An active request: what it verifies in the cycle to commit, and what its cycles brought."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_hvd.drafter.cycles import Cycles
from sglang_hvd.request_stats import RequestCounts
from sglang_hvd.types import DraftSource


@dataclass(slots=True, eq=False)
class DraftedRequest:
    """What the drafter knows of an active request.

    num_tokens: of the prompt and committed ones.
    cycles, place: the planned batch and this request's row in it; cycles is None between a commit
        and the next plan.
    """

    slot: int
    without_cache: bool
    num_tokens: int
    cycles: Cycles | None = None
    place: int = 0
    counts: RequestCounts = field(default_factory=RequestCounts)

    def end_cycle(self, source: DraftSource, num_accepted: int, num_tokens: int) -> None:
        """Counts it; the next one has to be planned.

        num_accepted: draft tokens that were accepted. num_tokens: committed, these included.
        """
        self.counts.add_cycle(source, num_accepted, num_tokens)
        self.num_tokens += num_tokens
        self.cycles = None


def cycles_of(requests: Sequence[DraftedRequest]) -> Cycles:
    """The cycles to commit of one request or more; entry i belongs to requests[i]."""
    batch, places = requests[0].cycles, [request.place for request in requests]
    if batch is not None and all(request.cycles is batch for request in requests):
        is_whole = len(batch.drafts) == len(places) and places == list(range(len(places)))
        return batch if is_whole else batch.select(places)
    parts = [r.cycles.select([r.place]) for r in requests if r.cycles is not None]
    assert len(parts) == len(requests), "a cycle must be planned before it is committed"
    return Cycles.concatenate(parts)


def slots_of(requests: Iterable[DraftedRequest]) -> npt.NDArray[np.int32]:
    """By which tracker, estimator and allocator know the requests: int32[num_requests]."""
    return np.array([request.slot for request in requests], np.int32)
