"""Tables of results, in Markdown: on a terminal and in a file they look the same."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.replay.core.policies import PolicyResult
from sglang_hvd.replay.core.recordings import MEAN
from sglang_hvd.replay.training.evaluate import Evaluation

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

_POLICY_COLUMNS = ("file", "policy", *_POLICY)

# Wider than any table: rich would fold lines to the width of the terminal.
_WIDTH = 10_000


def evaluation_table(evaluations: Sequence[Evaluation]) -> str:
    """One row per file and predictor, sorted by file; means come last."""
    rows = sorted(
        (_with_sum_of_drafts(evaluation.row()) for evaluation in evaluations),
        key=lambda row: (row["at"] != "cycle", *_by_file(row)),
    )
    labels = {"at": "at", "file": "file", "predictor": "predictor"}
    return markdown_table({**labels, **_QUALITY}, rows, num_labels=3)


def heldout_table(predictor: AcceptancePredictor) -> str:
    """A predictor's quality on the sessions that were held out of its training, or the reason why
    there is none."""
    rows = predictor.provenance["heldout"]
    assert isinstance(rows, list)
    if not rows:
        has_sessions = predictor.provenance["num_heldout_sessions"]
        without = (
            "no held-out session had a cache draft" if has_sessions else "nothing was held out"
        )
        return f"{without}: not judged"
    return markdown_table({"file": "file", **_QUALITY}, map(_with_sum_of_drafts, rows))


def policy_table(results: Sequence[PolicyResult]) -> str:
    """One row per file and policy, sorted by file; means come last."""
    rows = [{name: getattr(result, name) for name in _POLICY_COLUMNS} for result in results]
    columns = {"file": "file", "policy": "policy", **_POLICY}
    return markdown_table(columns, sorted(rows, key=_by_file), num_labels=2)


def markdown_table(
    columns: Mapping[str, str],
    rows: Iterable[Mapping[str, object]],
    *,
    num_labels: int = 1,
    digits: int = 3,
) -> str:
    """A Markdown table, with all columns as wide as they need to be.

    columns: titles by the names of the rows' values.
    num_labels: so many columns, from the left, are flush left; the others are flush right.
    digits: decimal places of floats.
    """
    # Imported here: a GPU server's environment may lack rich, and runs benchmarks.gpu_check.
    from rich.box import MARKDOWN
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=MARKDOWN)
    for place, title in enumerate(columns.values()):
        side: Literal["left", "right"] = "left" if place < num_labels else "right"
        table.add_column(Text(title), justify=side, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_cell(row[name], digits)) for name in columns))
    console = Console(width=_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get().strip()


def _cell(value: object, digits: int) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _with_sum_of_drafts(row: Mapping[str, object]) -> Mapping[str, object]:
    """The row; that of the mean says that its drafts are those of all files."""
    return {**row, "num_drafts": f"{row['num_drafts']} in all"} if row["file"] == MEAN else row


def _by_file(row: Mapping[str, object]) -> tuple[bool, str]:
    return row["file"] == MEAN, str(row["file"])
