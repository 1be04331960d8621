"""Writes docs/settings.md from HvdConfig, the one place that has the settings.

    python scripts/settings_page.py

A test compares the page with what this writes.
"""

import textwrap
from pathlib import Path
from typing import Any

import yaml

from sglang_hvd.config import FLAGS, READER, HvdConfig, option

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

# The first setting of each section; the others follow in the order of HvdConfig.
_SECTIONS = {
    "policy": "Policy and costs",
    "predictor": "Predictor",
    "cache_mode": "Suffix cache",
    "verify_width": "Widths and steps",
    "report_cycles": "Responses and recordings",
}

_INTRODUCTION = f"""\
# Settings

Each setting is a key of a YAML file, and `--hvd-set KEY=VALUE` on the command line. Those
that most users need, {len(FLAGS)} of them, also have a flag of their own:

    python -m sglang.launch_server ... --hvd-config my.yaml --hvd-policy cache \\
        --hvd-set calibrate=false

The command line overrides the file, and the file overrides the defaults. `null` stands for the
default that the text describes. A relative path in a file starts from that file's folder.

A setting that only one policy reads is refused with another policy. If the command line names the
policy, the file's settings for other policies are ignored.

`sgl.Engine` has no `--hvd-*` flags: the environment variable `HVD_CONFIG` names its file. A server
without `--hvd-config` reads that file, too.

`configs/default.yaml` has all settings with their defaults. This page is generated from
`sglang_hvd/config.py` by `scripts/settings_page.py`.
"""


def settings_page() -> str:
    """The text of docs/settings.md."""
    schema = HvdConfig.model_json_schema()["properties"]
    paragraphs = [_INTRODUCTION]
    for name, field in HvdConfig.model_fields.items():
        if name in _SECTIONS:
            paragraphs.append(f"## {_SECTIONS[name]}\n")
        default = yaml.safe_dump(field.default).partition("\n")[0]
        facts = [f"`{option(name, 'VALUE')}`", _values(schema[name]), f"default `{default}`"]
        if name in READER:
            facts.append(f"policy `{READER[name]}` only")
        text = textwrap.fill(field.description, 110, break_on_hyphens=False)
        paragraphs.append(f"### `{name}`\n\n{' · '.join(facts)}\n\n{text}\n")
    return "\n".join(paragraphs)


def _values(schema: dict[str, Any]) -> str:
    """Which values a setting has, from its JSON schema."""
    schema = schema.get("anyOf", [schema])[0]
    if "enum" in schema:
        return " | ".join(f"`{value}`" for value in schema["enum"])
    kind = {"boolean": "`true` | `false`", "string": "path", "array": "list of integers"}
    bounds = [schema.get("minimum"), schema.get("maximum")]
    least, most = ("" if bound is None else f"{bound:,}" for bound in bounds)
    if least and most:
        return f"{schema['type']}, {least} to {most}"
    return (
        f"{schema['type']}, at least {least}" if least else kind.get(schema["type"], schema["type"])
    )


if __name__ == "__main__":
    PAGE.write_text(settings_page())
