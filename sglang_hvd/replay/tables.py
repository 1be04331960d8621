"""What replays found, as Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence

from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.replay.evaluate import Evaluation
from sglang_hvd.replay.policies import PolicyResult
from sglang_hvd.replay.recordings import MEAN

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

_TEXTS = ("at", "file", "predictor", "policy")


def evaluation_table(evaluations: Sequence[Evaluation]) -> str:
    """One row per file and predictor, by file, the means last."""
    rows = sorted(
        (evaluation.row() for evaluation in evaluations),
        key=lambda row: (row["at"] != "cycle", *_by_file(row)),
    )
    labels = {"at": "at", "file": "file", "predictor": "predictor"}
    return _table({**labels, **_QUALITY}, rows)


def heldout_table(predictor: AcceptancePredictor) -> str:
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
    """One row per file and policy, by file, the means last."""
    rows = [{name: getattr(result, name) for name in _POLICY_COLUMNS} for result in results]
    columns = {"file": "file", "policy": "policy", **_POLICY}
    return _table(columns, sorted(rows, key=_by_file))


_POLICY_COLUMNS = ("file", "policy", *_POLICY)


def _by_file(row: Mapping[str, object]) -> tuple[bool, str]:
    return row["file"] == MEAN, str(row["file"])


def _table(columns: Mapping[str, str], rows: Iterable[Mapping[str, object]]) -> str:
    """Columns of figures are flush right."""
    lines = [[*columns.values()], *([_cell(name, row) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_text = [name in _TEXTS for name in columns]
    rule = [
        "-" * width if text else "-" * (width - 1) + ":"
        for width, text in zip(widths, is_text, strict=True)
    ]
    lines.insert(1, rule)
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, is_text, strict=True)
        )
        + " |"
        for line in lines
    )


def _cell(name: str, row: Mapping[str, object]) -> str:
    value = row[name]
    if value is None:
        return "-"
    if name == "num_drafts" and row["file"] == MEAN:
        return f"{value} in all"
    return f"{value:.3f}" if isinstance(value, float) else str(value).replace("|", "\\|")
