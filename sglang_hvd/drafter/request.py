"""An active request of the drafter, and the rows that a batch of requests has in arrays."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np
import numpy.typing as npt

from sglang_hvd.types import SOURCES, DraftLimits

_CACHE, _MODEL = SOURCES.bit_of("cache"), SOURCES.bit_of("model")
_NO_LIMIT = 2**30  # more nodes than any verification has


@dataclass(frozen=True, slots=True, eq=False)
class DraftedRequest:
    """What the drafter knows of an active request, besides what its core counts.

    of_cache: the small number by which the suffix cache and the core know the request.
    of_rest: the one by which tracker, sources and allocator know it.
    limits: None: it verifies what the policy chooses.
    teaches: the sources learn from its cycles.
    """

    of_cache: int
    of_rest: int
    limits: DraftLimits | None = None
    teaches: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class DraftedBatch:
    """The requests of a step. Row i belongs to rids[i].

    of_cache, of_rest: int32[num_requests], as in DraftedRequest.
    limits: None if no request has any.
    teaches: bool[num_requests]; None: the sources learn from all of them.
    """

    rids: Sequence[Hashable]
    of_cache: npt.NDArray[np.int32]
    of_rest: npt.NDArray[np.int32]
    limits: "BatchLimits | None"
    teaches: npt.NDArray[np.bool_] | None

    @classmethod
    def of(cls, rids: Sequence[Hashable], requests: Sequence[DraftedRequest]) -> "DraftedBatch":
        if len(set(rids)) < len(rids):
            raise ValueError("a request may appear only once in a step")
        teaches = np.array([request.teaches for request in requests], np.bool_)
        return cls(
            rids,
            np.array([request.of_cache for request in requests], np.int32),
            np.array([request.of_rest for request in requests], np.int32),
            limits_of(requests),
            None if teaches.all() else teaches,
        )

    def has_only(self, rids: Sequence[Hashable]) -> bool:
        """Whether these are its requests, in order."""
        if rids is self.rids:
            return True
        return len(rids) == len(self.rids) and all(map(is_, rids, self.rids))

    def __len__(self) -> int:
        return len(self.rids)


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
