"""`sglang-hvd replay`: compares the policies on recorded generations, without a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, WORTH_LEN, HvdConfig, Policy
from sglang_hvd.costs import StepCosts
from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.payoff.predictor import predictor_file
from sglang_hvd.replay.core.model_drafter import ModelDrafter
from sglang_hvd.replay.core.recording_walk import RecordingWalk
from sglang_hvd.replay.core.recordings import (
    MEAN,
    NOTHING_DECODED,
    Recording,
    TraceTokenizer,
    mean_over_families,
    tell_trained_on,
)
from sglang_hvd.replay.core.walk import WalkSettings, walk_recordings


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """A policy's figures on a file's measured sessions, or their mean over the families.

    mean_accepted: draft tokens per cycle, bonus token not counted.
    cache_share: share of the cycles that verified a cache draft, alone or in one tree with the
        model drafter's draft.
    both_share: share of the cycles that verified both drafts in one tree.
    oracle_share: share of the cache drafts that reach the paper's threshold.
    precision, recall: of the choice of the verified cache drafts; those that reach the threshold
        are the right ones.
    payoff_quantiles: accepted lengths of the cache drafts at 10, 50, 90 and 99 %.
    tokens_per_ms: by the cost table; None without one.
    """

    file: str
    family: str
    policy: str
    cycles_per_1k_tokens: float | None
    mean_accepted: float | None
    cache_share: float | None
    both_share: float | None
    oracle_share: float | None
    precision: float | None
    recall: float | None
    payoff_quantiles: tuple[float, ...] | None
    tokens_per_ms: float | None


def replay_policies(
    recordings: Sequence[Recording],
    tokenizer: TraceTokenizer,
    *,
    config: HvdConfig,
    costs: StepCosts | None,
    threshold: float | None,
    warm_up: float,
    shares_cache: bool,
    model_drafter: ModelDrafter,
    num_processes: int,
) -> list[PolicyResult]:
    """A row for each file and policy, and for each policy's mean over the families.

    Under every policy, sessions that the predictor was trained on only fill the shared cache; a
    line on stderr says so.

    config: the server's configuration, to which each policy is applied.
    threshold: threshold of the payoff policy; None: it has none.
    warm_up: share of each recording's sessions, from the first on, that only fill the shared cache.
    shares_cache: False: requests draft from their own session only.
    costs: step costs, used at batch size 1. Without them, or with a predictor of kind "mlp", policy
        `allocate` is left out.

    Raises ValueError, in one line, for traces or a predictor that cannot be used.
    """
    deciding = AcceptancePredictor.load(predictor_file(config))
    trained_on = deciding.trained_sessions
    width = DEFAULT_VERIFY_WIDTH if config.verify_width is None else config.verify_width
    if width <= model_drafter.num_steps + 1:
        raise ValueError(
            f"verify_width {width} has no room for both a cache draft and the model drafter's "
            f"{model_drafter.num_steps} nodes: set it to at least {model_drafter.num_steps + 2}"
        )
    tell_trained_on(recordings, trained_on, warm_up=warm_up)
    results = []
    for policy in get_args(Policy):
        if policy == "allocate" and (costs is None or deciding.kind == "mlp"):
            continue
        served = config.for_policy(policy)
        if policy == "payoff":
            served = served.model_copy(update={"threshold": threshold})
        walks = walk_recordings(
            recordings,
            tokenizer,
            WalkSettings(
                served,
                model_drafter=model_drafter,
                draft_limits=(_widest(served, width) - 1,),
                shares_cache=shares_cache,
                costs=costs,
                without=trained_on,
            ),
            label=f"replay, policy {policy}",
            num_processes=num_processes,
        )
        of_policy = [
            result
            for walk in walks
            if (result := _result(walk, policy, warm_up, trained_on)) is not None
        ]
        if not of_policy:
            raise ValueError(NOTHING_DECODED)
        results += [*of_policy, _mean(of_policy, policy)]
    return results


def _result(
    walk: RecordingWalk, policy: str, warm_up: float, trained_on: frozenset[str]
) -> PolicyResult | None:
    num_warm = int(len(walk.sessions) * warm_up)
    without = trained_on.union(session.fingerprint for session in walk.sessions[:num_warm])
    measured = walk.excluding(without)
    totals, rows = measured.totals(), measured.judged_rows()
    if not totals.num_cycles:
        return None
    result = PolicyResult(
        file=walk.name,
        family=walk.family,
        policy=policy,
        cycles_per_1k_tokens=totals.cycles_per_1k_tokens,
        mean_accepted=totals.mean_accepted_len,
        cache_share=totals.cache_share,
        both_share=totals.num_both / totals.num_cycles,
        oracle_share=None,
        precision=None,
        recall=None,
        payoff_quantiles=None,
        tokens_per_ms=totals.tokens_per_ms,
    )
    if rows is None:
        return result
    worth = rows.accepted_lens >= WORTH_LEN
    verified = rows.is_verified
    num_hits, num_worth = int((worth & verified).sum()), int(worth.sum())
    return replace(
        result,
        oracle_share=float(worth.mean()),
        precision=num_hits / int(verified.sum()) if verified.any() else None,
        recall=num_hits / num_worth if num_worth else None,
        payoff_quantiles=tuple(np.quantile(rows.accepted_lens, (0.1, 0.5, 0.9, 0.99)).tolist()),
    )


def _widest(config: HvdConfig, verify_width: int) -> int:
    """Maximum of nodes that a server of a dense model on a GPU verifies for one request."""
    if config.policy != "allocate":
        return verify_width
    wide = config.wide_width or config.default_wide_width(verify_width)
    return max(verify_width, wide or 0)


def _mean(results: Sequence[PolicyResult], policy: str) -> PolicyResult:
    """Each figure's mean over the families, where a family's figure is the mean over its files."""
    figures = {
        name: mean_over_families((result.family, getattr(result, name)) for result in results)
        for name in PolicyResult.__dataclass_fields__
        if name not in ("file", "family", "policy", "payoff_quantiles")
    }
    return PolicyResult(MEAN, "", policy, payoff_quantiles=None, **figures)
