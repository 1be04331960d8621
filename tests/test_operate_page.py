"""docs/operate.md has every metric and every figure of a response, as the code has them."""

from pathlib import Path

from sglang_hvd.plugin.requests.metrics import PREDICTOR_METRICS, SERVER_METRICS, Metric
from sglang_hvd.request_stats import RequestStats

PAGE = (Path(__file__).parents[1] / "docs" / "operate.md").read_text()


def row(metric: Metric) -> str:
    """The metric's row in the table."""
    suffix = "_total" if metric.merged is None and metric.buckets is None else ""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}{suffix}` | {labels} | {metric.text} |"


def test_the_table_of_metrics_is_that_of_the_code() -> None:
    section = PAGE.split("\n## Metrics\n")[1].split("\n## ")[0]
    rows = [
        line for line in section.splitlines() if line.startswith("| `") and "hvd_..." not in line
    ]
    assert rows == [row(metric) for metric in (*SERVER_METRICS, *PREDICTOR_METRICS)]


def test_every_figure_of_a_response_is_named() -> None:
    assert [name for name in RequestStats().figures() if f"`{name}`" not in PAGE] == []
