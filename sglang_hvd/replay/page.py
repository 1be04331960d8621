"""An analysis as one HTML page that needs nothing else: plots, and all their figures in tables."""

from pathlib import Path

from sglang_hvd.replay.analysis import Analysis
from sglang_hvd.replay.cache_sections import payoff_section, structure_section
from sglang_hvd.replay.findings import findings
from sglang_hvd.replay.plots import escape
from sglang_hvd.replay.predictor_sections import (
    calibration_section,
    importance_section,
    quality_section,
)


def write_page(analysis: Analysis, *, command: str) -> str:
    """The page. command: what it was made with."""
    found = findings(analysis)
    sections = [
        structure_section(analysis, found[0]),
        payoff_section(analysis, found[1]),
        quality_section(analysis, found[2]),
        calibration_section(analysis, found[3]),
        importance_section(analysis, found[4]),
    ]
    title = f"Cache drafts in {analysis.about.traces}"
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>{_about(analysis, command)}</header>"
        f"<main>{''.join(sections)}</main></body></html>\n"
    )


def _about(analysis: Analysis, command: str) -> str:
    about = analysis.about
    left_out = (
        f", {about.num_trained_sessions} more only fill the shared cache: a predictor was trained "
        "on them"
        if about.num_trained_sessions
        else ""
    )
    facts = {
        "traces": f"{about.num_sessions} sessions in {len(about.files)} files of {about.traces} "
        f"({', '.join(about.files)}){left_out}",
        "tokenizer": about.tokenizer,
        "cache mode": about.cache_mode,
        "policy": f"{about.policy}, threshold {about.threshold:g} tokens; the model drafter is not "
        f"run and taken to have {about.num_model_accepted} tokens accepted in each of its cycles",
        "predictor": f"{about.predictor} ({about.predictor_fingerprint})",
    }
    lines = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return f"<dl>{lines}<dt>command</dt><dd><code>{escape(command)}</code></dd></dl>"
