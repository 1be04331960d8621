"""Plans by what every choice brings and costs: policy allocate (docs/allocation.md)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import DraftOdds, StepAllocator, TakenDrafts
from sglang_hvd.drafter.cycles import Cycles
from sglang_hvd.drafter.forecasts import AllocationForecast
from sglang_hvd.drafter.proposals import Proposals
from sglang_hvd.drafter.request import DraftedRequest
from sglang_hvd.types import DraftPlans


class CostPlanner:
    """The allocator's decision as plans, and what was expected of them."""

    def __init__(self, allocator: StepAllocator) -> None:
        self._allocator = allocator

    def plan(
        self, requests: Sequence[DraftedRequest], proposals: Proposals, *, next_waits: bool
    ) -> tuple[DraftPlans, Cycles]:
        """Row i of the proposals belongs to requests[i]. next_waits: see StepAllocator.allocate."""
        forecast = _forecast(proposals)
        found = self._allocator.allocate(
            forecast.slots,
            _odds(forecast, len(requests)),
            _are_pinned(requests),
            num_context=_num_context(requests),
            next_waits=next_waits,
        )
        # The predictor is judged by what it says itself of chains, heeded or not.
        taken = forecast.trees.take(
            found.num_cache,
            forecast.prediction_survival,
            proposals.drafts,
            width=found.most_cache,
        )
        steps = np.full(len(requests), found.num_steps, np.int32)
        cycles = _cycles(taken, found.model_size, steps, found.model_expected)
        payoffs = forecast.prediction.accepted_lens
        plans = DraftPlans(taken.drafts, payoffs, found.num_model, found.num_steps)
        return plans, cycles

    def plan_launched(
        self, requests: Sequence[DraftedRequest], proposals: Proposals
    ) -> tuple[Cycles, bool]:
        """The cycles of a step that was launched without drafts, and whether drafts would have been
        better. Row i of the proposals belongs to requests[i]."""
        forecast = _forecast(proposals)
        wants_drafts = self._allocator.wants_drafts(
            forecast.slots,
            _odds(forecast, len(requests)),
            _are_pinned(requests),
            num_context=_num_context(requests),
        )
        nothing = np.zeros(len(requests), np.int32)
        taken = forecast.trees.take(
            nothing, forecast.prediction_survival, proposals.drafts, width=0
        )
        return _cycles(taken, nothing, nothing, np.zeros(len(requests), np.float32)), wants_drafts


def _forecast(proposals: Proposals) -> AllocationForecast:
    assert isinstance(proposals.forecast, AllocationForecast), "the proposals are of another policy"
    return proposals.forecast


def _odds(forecast: AllocationForecast, num: int) -> DraftOdds:
    trees, reaches = forecast.trees, forecast.model_reaches
    return DraftOdds(
        trees.probs[:num],
        trees.depths[:num],
        trees.num_nodes[:num],
        reaches.of_all,
        reaches.if_cache_right,
    )


def _num_context(requests: Sequence[DraftedRequest]) -> int:
    return sum(request.num_tokens for request in requests)


def _are_pinned(requests: Sequence[DraftedRequest]) -> npt.NDArray[np.bool_] | None:
    without_cache = [request.without_cache for request in requests]
    return np.array(without_cache) if any(without_cache) else None


def _cycles(
    taken: TakenDrafts,
    model_sizes: npt.NDArray[np.int32],
    model_steps: npt.NDArray[np.int32],
    model_expected: npt.NDArray[np.float32],
) -> Cycles:
    return Cycles(
        drafts=taken.drafts,
        chain_lens=taken.chain_lens,
        chain_expected=taken.chain_expected,
        model_sizes=model_sizes,
        model_steps=model_steps,
        model_expected=model_expected,
    )
