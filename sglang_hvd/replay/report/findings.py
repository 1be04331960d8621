"""Says in words what the figures of an analysis show: one sentence for each section and plot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_hvd.config import MARGINAL_LEN, WORTH_LEN
from sglang_hvd.replay.core.recordings import MEAN
from sglang_hvd.replay.report.analysis import (
    RECALLS,
    Analysis,
    Bin,
    Payoffs,
    Structure,
)
from sglang_hvd.replay.training.evaluate import Evaluation

# How the page and the plots name the values of `copied_shares`, `predictor` and `verified_*`.
ORIGINS = {
    "prompt": "from the prompt",
    "output": "from its own output",
    "own": "from the request itself",
    "finished": "from finished requests",
}
PREDICTORS = {"predictor": "predictor", "mlp": "mlp", "frequency": "frequency score"}
VERIFIED = {
    "high": f"at least {WORTH_LEN} tokens",
    "marginal": f"{MARGINAL_LEN} to {WORTH_LEN - 1}",
    "low": f"0 to {MARGINAL_LEN - 1}",
}

_RECALL_60 = RECALLS.index(0.6)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a section shows: all in all, and in each of its two plots. The sentences are ASCII
    except for names from the traces."""

    summary: str
    plots: tuple[str, str]


def findings(analysis: Analysis) -> tuple[Finding, ...]:
    """The findings on structure, payoffs, prediction, calibration and importance, in this order."""
    return (
        _of_structure([row for row in analysis.structure if row.file is None]),
        _of_payoffs(analysis.payoffs),
        _of_quality(analysis),
        _of_calibration(analysis),
        _of_importance(analysis),
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _pooled_survival(payoffs: Sequence[Payoffs]) -> list[float]:
    """Shares of the drafts of all families together with at least 1, 2, ... accepted tokens."""
    num_drafts = sum(of_family.num_drafts for of_family in payoffs)
    return [
        sum(p.num_drafts * share for p, share in zip(payoffs, shares, strict=True)) / num_drafts
        for shares in zip(*(of_family.survival for of_family in payoffs), strict=True)
    ]


def _of_structure(families: Sequence[Structure]) -> Finding:
    return Finding(
        "The suffix cache proposes the right next token at "
        + _range(families, lambda row: row.copied_share, "of the places"),
        (
            _origin(families),
            "The payoff policy verifies a cache draft in "
            + _range(families, lambda row: row.cache_share, "of the cycles"),
        ),
    )


def _range(rows: Sequence[Structure], share_of: Callable[[Structure], float], of: str) -> str:
    highest, lowest = max(rows, key=share_of), min(rows, key=share_of)
    text = f"{_percent(share_of(highest))} {of}"
    if len(rows) == 1:
        return text  # a single family needs no name: recordings of a server are all "recorded"
    text += f" in {highest.family}"
    if highest is lowest:
        return text
    return f"{text}, {_percent(share_of(lowest))} in {lowest.family}"


def _origin(families: Sequence[Structure]) -> str:
    names = {
        "prompt": "the prompt",
        "output": "the request's own output",
        "own": "the request itself",
        "finished": "finished requests",
    }
    main: dict[str, list[str]] = {}
    for row in families:
        if row.copied_share:
            origin = max(row.copied_shares, key=lambda name: row.copied_shares[name])
            main.setdefault(names[origin], []).append(row.family)
    if not main:
        return "Nothing can be copied"
    [first, *others] = sorted(main, key=lambda name: -len(main[name]))
    if not others:
        return f"Most of it comes from {first}"
    exceptions = "; ".join(f"in {' and '.join(main[name])} from {name}" for name in others)
    return f"Most of it comes from {first}; {exceptions}"


def _of_payoffs(payoffs: Sequence[Payoffs]) -> Finding:
    survival = _pooled_survival(payoffs)
    best = max(payoffs, key=lambda row: row.oracle_share)
    worst = min(payoffs, key=lambda row: row.oracle_share)
    summary = (
        f"{_percent(survival[WORTH_LEN - 1])} of the proposed cache drafts yield {WORTH_LEN} "
        "tokens or more"
    )
    if best is not worst:
        summary += (
            f": {_percent(best.oracle_share)} in {best.family}, "
            f"{_percent(worst.oracle_share)} in {worst.family}"
        )
    half, tenth = (sum(value >= limit for value in survival) for limit in (0.5, 0.1))
    if half:
        lengths = f"Half of the drafts yield {_num_tokens(half)} or more, a tenth {tenth}"
    elif tenth:
        lengths = f"Most drafts yield nothing, a tenth yield {_num_tokens(tenth)} or more"
    else:
        lengths = "More than nine drafts in ten yield nothing"
    num_verified = sum(row.num_verified for row in payoffs)
    if not num_verified:
        verified = "No cache draft was verified"
    else:
        num_high = sum(row.num_verified * (row.verified_high_share or 0) for row in payoffs)
        verified = (
            f"{_percent(num_high / num_verified)} of the verified drafts yield {WORTH_LEN} tokens "
            "or more"
        )
    return Finding(summary, (lengths, verified))


def _num_tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


def _of_quality(analysis: Analysis) -> Finding:
    if not analysis.curves:
        nothing = f"No cache draft yields {WORTH_LEN} tokens: there is nothing to find"
        return Finding(nothing, (nothing, nothing))
    at_cycles = [row for row in analysis.quality if row.at == "cycle"]
    means = {row.predictor: row.quality for row in at_cycles if row.file == MEAN}
    found, score = means["predictor"], means["frequency"]
    curves = {curve.predictor: curve for curve in analysis.curves}
    return Finding(
        f"The predictor finds {_percent(found.recall)} of the drafts worth verifying with a "
        f"precision of {_percent(found.precision)}; the frequency score {_percent(score.recall)} "
        f"with {_percent(score.precision)}",
        (
            _hardest([row for row in at_cycles if row.predictor == "predictor"]),
            "At a recall of 60% the predictor's precision is "
            f"{_percent(curves['predictor'].at_recall[_RECALL_60])}, the frequency score's "
            f"{_percent(curves['frequency'].at_recall[_RECALL_60])}",
        ),
    )


def _hardest(rows: Sequence[Evaluation]) -> str:
    known = [
        (row.quality.average_precision, row.file)
        for row in rows
        if row.file != MEAN and row.quality.average_precision is not None
    ]
    best, worst = max(known), min(known)
    text = f"Average precision is {best[0]:.2f}"
    if len({row.file for row in rows} - {MEAN}) == 1:
        return text
    text += f" in {best[1]}"
    return text if best == worst else f"{text}, {worst[0]:.2f} in {worst[1]}"


def _of_calibration(analysis: Analysis) -> Finding:
    bins = {(one.predictor, one.of): one.bins for one in analysis.calibration}
    predicted, real = _means(bins["predictor", "length"])
    length = f"The predictor expects {predicted:.1f} tokens on average, {real:.1f} are accepted"
    probabilities = bins.get(("predictor", "probability"))
    if probabilities is None:
        return Finding(length, ("This predictor gives no probability", length))
    num_drafts = sum(one.num_drafts for one in probabilities)
    error = sum(one.num_drafts * abs(one.predicted - one.real) for one in probabilities)
    predicted, real = _means(probabilities)
    return Finding(
        f"The predictor's probability of {WORTH_LEN} tokens is off by "
        f"{100 * error / num_drafts:.1f} percentage points on average over the drafts",
        (
            f"It expects {_percent(predicted)} of the drafts to yield {WORTH_LEN} tokens; "
            f"{_percent(real)} do",
            length,
        ),
    )


def _means(bins: Sequence[Bin]) -> tuple[float, float]:
    num_drafts = sum(one.num_drafts for one in bins)
    return (
        sum(one.num_drafts * one.predicted for one in bins) / num_drafts,
        sum(one.num_drafts * one.real for one in bins) / num_drafts,
    )


def _of_importance(analysis: Analysis) -> Finding:
    importance = analysis.importance
    if importance is None:
        nothing = (
            f"None of the sampled cache drafts yields {WORTH_LEN} tokens: there is no precision "
            "to lose"
        )
        return Finding(nothing, (nothing, nothing))
    group, feature = importance.groups[0], importance.features[0]
    return Finding(
        f"The predictor relies most on this group of inputs: {group.name}",
        (
            f"Without it, average precision falls by {group.drop:.2f} from "
            f"{importance.average_precision:.2f}",
            f"The single input that it relies on most is {feature.name}: {feature.drop:.3f}",
        ),
    )
