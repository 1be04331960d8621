"""What replays found, as Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence

from sglang_hvd.payoff import PayoffPredictor
from sglang_hvd.replay.evaluate import Evaluation
from sglang_hvd.replay.policies import PolicyResult

_QUALITY = {
    "num_drafts": "drafts",
    "oracle_share": "oracle share",
    "precision": "precision",
    "recall": "recall",
    "average_precision": "average precision",
    "roc_auc": "ROC area",
    "precision_at_recall_60": "precision at recall .6",
    "precision_at_recall_78": "precision at recall .78",
    "calibration_error": "calibration error, worst tenth",
    "mean_absolute_error": "mean absolute error",
}
_POLICY = {
    "cycles_per_1k_tokens": "cycles per 1K tokens",
    "mean_accepted": "mean accepted",
    "cache_share": "cache share",
    "both_share": "both share",
    "oracle_share": "oracle share",
    "precision": "precision",
    "recall": "recall",
    "tokens_per_ms": "tokens per ms",
}


def evaluation_table(evaluations: Sequence[Evaluation]) -> str:
    """One row per file and predictor, the means last."""
    rows = sorted(
        (evaluation.row() for evaluation in evaluations),
        key=lambda row: (row["at"] != "cycle", row["file"] == "mean"),
    )
    labels = {"at": "at", "file": "file", "predictor": "predictor"}
    return _table({**labels, **_QUALITY}, rows)


def heldout_table(predictor: PayoffPredictor) -> str:
    """A predictor's quality on the sessions that were held out of its training, or why there is
    none."""
    rows = predictor.provenance["heldout"]
    assert isinstance(rows, list)
    if not rows:
        has_sessions = predictor.provenance["num_heldout_sessions"]
        without = (
            "no held-out session had a cache draft" if has_sessions else "nothing was held out"
        )
        return f"{without}: not judged"
    return _table({"file": "file", **_QUALITY}, rows)


def policy_table(results: Sequence[PolicyResult]) -> str:
    """One row per file and policy, the means last."""
    rows = [{name: getattr(result, name) for name in _POLICY_COLUMNS} for result in results]
    columns = {"file": "file", "policy": "policy", **_POLICY}
    return _table(columns, sorted(rows, key=lambda row: row["file"] == "mean"))


_POLICY_COLUMNS = ("file", "policy", *_POLICY)


def _table(columns: Mapping[str, str], rows: Iterable[Mapping[str, object]]) -> str:
    lines = [f"| {' | '.join(columns.values())} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(_cell(row[name]) for name in columns)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
