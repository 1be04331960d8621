"""Generated settings files (Python, YAML, TOML) and changes of their lines."""

from random import Random

from sglang_hvd.demo.corpus.edits import SourceFile
from sglang_hvd.demo.corpus.words import CITIES, COLORS, NOUNS, identifier, identifiers, number

_SYNTAX = {  # language: (extension, section header, line)
    "python": ("py", "# {} settings", "{} = {}"),
    "yaml": ("yaml", "{}:", "  {}: {}"),
    "toml": ("toml", "[{}]", "{} = {}"),
}


def make_settings(rng: Random) -> SourceFile:
    """Two or three sections of keys; no key begins another."""
    language = rng.choice(tuple(_SYNTAX))
    extension, header, line = _SYNTAX[language]
    keys = identifiers(rng, rng.randint(8, 16))
    starts = {0, *rng.sample(range(3, len(keys)), rng.randint(1, 2))}
    sections = iter(rng.sample(NOUNS, len(starts)))
    lines: list[str] = []
    for index, key in enumerate(keys):
        if index in starts:
            lines.append(header.format(next(sections)))
        lines.append(line.format(key, _value(rng)))
    return SourceFile(f"{rng.choice(NOUNS)}.{extension}", language, tuple(lines))


def change_setting(rng: Random, file: SourceFile, index: int) -> str:
    """The line at `index` with another value, another name or commented out."""
    line = file.lines[index]
    separator = _SYNTAX[file.language][2].strip()[2:-2]
    if separator not in line:
        return line.replace(line.strip("# []:").split()[0], rng.choice(NOUNS))
    key, value = line.split(separator, 1)
    kind = rng.random()
    if kind < 0.6:
        return f"{key}{separator}{_value(rng)}"
    if kind < 0.85:
        indent = key[: len(key) - len(key.lstrip())]
        return f"{indent}{identifier(rng)}{separator}{value}"
    return f"# {line.strip()}"


def _value(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return str(number(rng))
    if kind < 0.75:
        return f'"{rng.choice(COLORS)} {rng.choice(NOUNS)}"'
    return f'"{rng.choice(CITIES)}"'
