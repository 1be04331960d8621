"""What the figures of an analysis say, in one sentence each. ASCII, but for the traces' names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.replay.analysis import RECALLS, Analysis, Bin, Payoffs, Structure
from sglang_hvd.replay.core.recordings import MEAN
from sglang_hvd.replay.training.evaluate import Evaluation

_RECALL_60 = RECALLS.index(0.6)


@dataclass(frozen=True, slots=True)
class Finding:
    """What the figures of a section say: in all, and in each of its two plots."""

    summary: str
    plots: tuple[str, str]


def findings(analysis: Analysis) -> tuple[Finding, ...]:
    """One each for the sections on structure, payoff, prediction, calibration and importance."""
    return (
        _of_structure([row for row in analysis.structure if row.file is None]),
        _of_payoffs(analysis.payoffs),
        _of_quality(analysis),
        _of_calibration(analysis),
        _of_importance(analysis),
    )


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def pooled_survival(payoffs: Sequence[Payoffs]) -> list[float]:
    """Share of all families' drafts together with at least 1, 2, ... accepted tokens."""
    num_drafts = sum(of_family.num_drafts for of_family in payoffs)
    return [
        sum(p.num_drafts * share for p, share in zip(payoffs, shares, strict=True)) / num_drafts
        for shares in zip(*(of_family.survival for of_family in payoffs), strict=True)
    ]


def _of_structure(families: Sequence[Structure]) -> Finding:
    return Finding(
        "The suffix cache has the next token right at "
        + _range(families, lambda row: row.copied_share, "of the places"),
        (
            _origin(families),
            "The payoff policy verifies a cache draft in "
            + _range(families, lambda row: row.cache_share, "of the cycles"),
        ),
    )


def _range(rows: Sequence[Structure], share: Callable[[Structure], float], of: str) -> str:
    most, least = max(rows, key=share), min(rows, key=share)
    text = f"{percent(share(most))} {of}"
    if len(rows) == 1:
        return text  # of one family nobody asks which: recordings of a server are all "recorded"
    text += f" in {most.family}"
    return text if most is least else f"{text}, {percent(share(least))} in {least.family}"


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
    survival = pooled_survival(payoffs)
    most = max(payoffs, key=lambda row: row.oracle_share)
    least = min(payoffs, key=lambda row: row.oracle_share)
    summary = (
        f"{percent(survival[WORTH_LEN - 1])} of the proposed cache drafts bring {WORTH_LEN} tokens "
        "or more"
    )
    if most is not least:
        summary += (
            f": {percent(most.oracle_share)} in {most.family}, "
            f"{percent(least.oracle_share)} in {least.family}"
        )
    num_half, num_tenth = (sum(share >= least for share in survival) for least in (0.5, 0.1))
    if num_half:
        lengths = f"Half of the drafts bring {_tokens(num_half)} or more, a tenth {num_tenth}"
    elif num_tenth:
        lengths = f"Most drafts bring nothing, a tenth bring {_tokens(num_tenth)} or more"
    else:
        lengths = "More than nine drafts in ten bring nothing"
    num_verified = sum(row.num_verified for row in payoffs)
    if not num_verified:
        verified = "No cache draft was verified"
    else:
        num_high = sum(row.num_verified * (row.verified_high_share or 0) for row in payoffs)
        verified = (
            f"{percent(num_high / num_verified)} of the verified drafts bring {WORTH_LEN} or more"
        )
    return Finding(summary, (lengths, verified))


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


def _of_quality(analysis: Analysis) -> Finding:
    if not analysis.curves:
        nothing = f"No cache draft brings {WORTH_LEN} tokens: there is nothing to find"
        return Finding(nothing, (nothing, nothing))
    at_cycles = [row for row in analysis.quality if row.at == "cycle"]
    means = {row.predictor: row.quality for row in at_cycles if row.file == MEAN}
    found, score = means["predictor"], means["frequency"]
    curves = {curve.predictor: curve for curve in analysis.curves}
    return Finding(
        f"The predictor finds {percent(found.recall)} of the drafts worth verifying with a "
        f"precision of {percent(found.precision)}; the frequency score {percent(score.recall)} "
        f"with {percent(score.precision)}",
        (
            _hardest([row for row in at_cycles if row.predictor == "predictor"]),
            "With a recall of 60% the predictor's precision is "
            f"{percent(curves['predictor'].at_recall[_RECALL_60])}, the frequency score's "
            f"{percent(curves['frequency'].at_recall[_RECALL_60])}",
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
        f"{100 * error / num_drafts:.1f} percentage points in the mean over the drafts",
        (
            f"It expects {percent(predicted)} of the drafts to bring {WORTH_LEN} tokens; "
            f"{percent(real)} do",
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
            f"None of the cache drafts looked at brings {WORTH_LEN} tokens: there is no precision "
            "to lose"
        )
        return Finding(nothing, (nothing, nothing))
    group, feature = importance.groups[0], importance.features[0]
    return Finding(
        f"What the predictor leans on most: {group.name}",
        (
            f"Without it average precision falls by {group.drop:.2f}, from "
            f"{importance.average_precision:.2f}",
            f"The single input it leans on most is {feature.name}: {feature.drop:.3f}",
        ),
    )
