"""What a policy expected its choices to gain, for the reports of the rows that ask."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import DrafterChoices
from sglang_hvd.config import Policy
from sglang_hvd.drafter.proposer import ChainPrediction, Proposals, TreePrediction
from sglang_hvd.types import SCORE, DraftPlans, ExpectedGains, Places

Float32 = npt.NDArray[np.float32]


def gains_by_rule(plans: DraftPlans, proposals: Proposals, policy: Policy) -> ExpectedGains:
    """What the choices of these plans were expected to gain, as the policy predicts it. Policy
    frequency has the suffix cache's own estimate, its score."""
    gains = ExpectedGains.unknown(len(plans))
    match policy:
        case "payoff":
            predicted = proposals.predicted
            assert isinstance(predicted, ChainPrediction), "the proposals are of another policy"
            gains.cache[:] = proposals.where_drafted(predicted.prediction.accepted_lens)
            gains.model[:] = predicted.model_lens
        case "frequency":
            scores = proposals.drafts.matches[: proposals.num_requests, SCORE]
            gains.cache[:] = proposals.where_drafted(scores)
    takes_cache, takes_model = plans.drafts.num_nodes > 0, plans.num_model_nodes > 0
    gains.verified[:] = np.select(
        [takes_cache & takes_model, takes_cache, takes_model],
        [gains.both, gains.cache, gains.model],
        np.float32(0),
    )
    return gains


def gains_by_costs(
    plans: DraftPlans,
    proposals: Proposals,
    drafters: Sequence[DrafterChoices],
    asked: Places,
) -> ExpectedGains:
    """What the choices of the asked rows were expected to gain, by the acceptance that the
    allocator was given; NaN in other rows. The cache draft includes its branches."""
    predicted, num, rows = proposals.predicted, len(asked), np.asarray(asked)
    assert isinstance(predicted, TreePrediction), "the proposals are of another policy"
    of_host = predicted.trees.num_nodes[rows]
    full = np.full(num, len(drafters[0].sizes) - 1)
    all_steps, none = np.full(num, drafters[0].num_steps[-1]), np.zeros(num, np.int64)
    # The sizes of all drafters stand one after the other.
    place = plans.table.device_bits.index(plans.drafter)
    first = sum(len(drafter.sizes) for drafter in drafters[:place])
    chosen = first + np.searchsorted(drafters[place].sizes, plans.model_sizes[rows])
    steps = np.where(plans.num_model_nodes[rows] > 0, plans.model_steps[rows], 0)
    has_draft, unknown = of_host > 0, np.float32(np.nan)
    of_cache = _gains(predicted, rows, of_host, full, none)
    of_both = _gains(predicted, rows, of_host, full, all_steps)
    gains = ExpectedGains.unknown(len(plans))
    gains.cache[rows] = np.where(has_draft, of_cache, unknown)
    gains.model[rows] = _gains(predicted, rows, none, full, all_steps)
    gains.both[rows] = np.where(has_draft, of_both, unknown)
    gains.verified[rows] = _gains(predicted, rows, plans.drafts.num_nodes[rows], chosen, steps)
    return gains


def _gains(
    predicted: TreePrediction,
    rows: npt.NDArray[np.integer[Any]],
    num_host: npt.NDArray[np.integer[Any]],
    sizes: npt.NDArray[np.integer[Any]],
    num_steps: npt.NDArray[np.integer[Any]],
) -> Float32:
    """Predicted accepted tokens of two drafts in one tree, float32[len(rows)]: by predict_both of
    allocation/native/allocate.hpp, for a report.

    rows: the requests. num_host: first nodes of each host draft. sizes: place of the size of each
        draft from the device, among the sizes of all drafters. num_steps: its steps, 0 for no such
        draft.
    """
    trees = predicted.trees
    is_taken = np.arange(trees.probs.shape[1]) < num_host[:, None]
    probs = np.where(is_taken, trees.probs[rows], 0)
    of_model = predicted.model_acceptance.of_all[rows, sizes]
    if_right = predicted.model_acceptance.if_cache_right[rows, sizes]
    depths = np.arange(1, of_model.shape[1] + 1)
    is_at = trees.depths[rows, :, None] == depths
    of_host = np.minimum((probs[:, :, None] * is_at).sum(axis=1), 1)
    added = np.maximum(of_model - of_host * if_right, 0) * (depths <= num_steps[:, None])
    gains: Float32 = (probs.sum(axis=1) + added.sum(axis=1)).astype(np.float32)
    return gains
