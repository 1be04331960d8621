"""The command doctor: says what this environment would do with a model, and loads no weights."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import sglang_hvd
from sglang_hvd.plugin.startup.environment import SECTIONS, Finding, examine_environment

_STYLES = {"ok": "green", "note": "yellow", "fault": "bold red"}

# From this number of columns on, what was found stands next to its topic.
_WIDE = 72


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False  # other flags are SGLang's, and may begin alike
    parser.add_argument(
        "--model-path",
        "--model",
        metavar="MODEL",
        help="target model: a folder, or a name of a hub",
    )
    parser.add_argument(
        "--draft-model-path",
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        metavar="MODEL",
        help="its EAGLE3 drafter",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.epilog = (
        "All other flags are those of python -m sglang.launch_server. The exit code is 0 if a "
        "server would start, 1 if it would not, and 2 for flags that cannot be read."
    )


def run_doctor(options: argparse.Namespace) -> int:
    flags = _flags(options)
    console = Console(soft_wrap=True, highlight=False)
    # Bound to today's stderr: while SGLang is imported, what it prints there is kept back.
    with Console(file=sys.stderr).status("Importing SGLang, which takes some seconds"):
        findings = list(examine_environment())
        figures: dict[str, Any] = {}
        if flags and not _faults(findings):
            from sglang_hvd.plugin.examination import examine_launch

            examination = examine_launch(flags)
            findings += examination.findings
            figures = examination.figures
    findings.sort(key=lambda finding: SECTIONS.index(finding.section))
    faults = _faults(findings)
    if options.json:
        result = {
            "version": sglang_hvd.__version__,
            "would_serve": not faults,
            "findings": [asdict(finding) for finding in findings],
            "launch": figures or None,
        }
        print(json.dumps(result, indent=1))
    else:
        _print(console, findings, _verdict(len(faults), examined=bool(flags)))
    return 1 if faults else 0


def _flags(options: argparse.Namespace) -> list[str]:
    """The flags of the server to examine; none if no model is given."""
    models = {
        "--model-path": options.model_path,
        "--speculative-draft-model-path": options.draft_model_path,
    }
    given = [word for flag, path in models.items() if path is not None for word in (flag, path)]
    given += options.more_flags
    return ["--speculative-algorithm", "HVD", *given] if given else []


def _faults(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status == "fault"]


def _verdict(num_faults: int, *, examined: bool) -> str:
    if num_faults:
        return f"A server with HVD would not start: {num_faults} fault{'s'[: num_faults > 1]}."
    if examined:
        return (
            "A server with HVD would start. Not checked: what the weights contain, and the memory "
            "for KV cache and graphs, which is measured at the start."
        )
    return (
        "SGLang with HVD is ready. Give --model-path, --draft-model-path and the server's other "
        "flags to examine a launch."
    )


def _print(console: Console, findings: Sequence[Finding], verdict: str) -> None:
    if not console.is_terminal:
        for finding in findings:
            console.print(f"{finding.status:5} {finding.topic:16} {finding.text}", markup=False)
        console.print(verdict, markup=False)
        return
    for section, of_section in groupby(findings, key=lambda finding: finding.section):
        console.print(Text(section.capitalize(), style="bold underline"))
        console.print(_table(of_section, is_wide=console.width >= _WIDE), soft_wrap=False)
        console.print()
    console.print(Text(verdict, style="bold"), soft_wrap=False)


def _table(findings: Iterable[Finding], *, is_wide: bool) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=5)
    if is_wide:
        table.add_column(min_width=16)
    table.add_column(overflow="fold")
    for finding in findings:
        mark = Text(finding.status, style=_STYLES[finding.status])
        topic, text = Text(finding.topic, style="bold"), Text(finding.text)
        table.add_row(mark, *((topic, text) if is_wide else [Text.assemble(topic, ": ", text)]))
    return table
