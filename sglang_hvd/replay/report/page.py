"""Writes an analysis as one HTML page that needs no network: plots, and their figures in tables."""

from jinja2 import Environment

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.replay.report.analysis import RECALLS, Analysis, Bin, Structure
from sglang_hvd.replay.report.figures import draw
from sglang_hvd.replay.report.findings import ORIGINS, PREDICTORS, VERIFIED, findings
from sglang_hvd.view.pages import page_environment, share, tokens


def write_page(analysis: Analysis, *, command: str) -> str:
    """The page. `command` is the command line that made it."""
    found = findings(analysis)
    return (
        _environment()
        .get_template("analysis.html")
        .render(
            analysis=analysis,
            command=command,
            findings=found,
            plots=draw(analysis, found),
            rows=_structure_rows(analysis),
            origins=[f"{ORIGINS[origin]}, %" for origin in analysis.structure[0].copied_shares],
            classes=[f"{name.replace('_', ' ')}, %" for name in analysis.structure[0].class_shares],
        )
    )


def _environment() -> Environment:
    environment = page_environment("sglang_hvd.replay.report")
    environment.filters |= {
        "share": share,
        "tokens": tokens,
        "area": _area,
        "called": PREDICTORS.__getitem__,
        "limits": _limits,
    }
    environment.globals |= {
        "PREDICTORS": PREDICTORS,
        "RECALLS": RECALLS,
        "VERIFIED": [f"{text}, %" for text in VERIFIED.values()],
        "WORTH_LEN": WORTH_LEN,
    }
    return environment


def _area(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.3f}"


def _limits(b: Bin, of: str) -> str:
    form = share if of == "probability" else tokens
    if b.low is None:
        return f"below {form(b.high)}"
    return f"from {form(b.low)}" if b.high is None else f"{form(b.low)} to {form(b.high)}"


def _structure_rows(analysis: Analysis) -> list[Structure]:
    """Each family before its files; a family of one file is left out, its file says the same."""
    listed = []
    for family in analysis.families:
        whole, *files = [row for row in analysis.structure if row.family == family]
        listed += files if len(files) == 1 else [whole, *files]
    return listed
