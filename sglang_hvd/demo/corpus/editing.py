"""File editing: each turn changes some lines of a file and the reply repeats the whole file.

The files are generated Python modules and settings files (Python, YAML, TOML).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from sglang_hvd.demo.corpus.session import Session, Turn
from sglang_hvd.demo.corpus.words import (
    ASPECTS,
    CITIES,
    COLORS,
    NOUNS,
    QUALITIES,
    VERBS,
    identifier,
    identifiers,
    number,
)


def make_session(rng: Random) -> Session:
    """Two to four edits of one file, each of one to three lines."""
    is_settings = rng.random() < 0.6
    file = make_settings(rng) if is_settings else make_module(rng)
    change = change_setting if is_settings else change_module_line
    turns: list[Turn] = []
    for index in range(rng.randint(2, 4)):
        changeable = [i for i, line in enumerate(file.lines) if line]
        changed = {
            i: change(rng, file, i) for i in rng.sample(changeable, rng.choice((1, 1, 1, 2, 3)))
        }
        numbers = ", ".join(str(i + 1) for i in sorted(changed))
        noun = "line" if len(changed) == 1 else "lines"
        lines = tuple(changed.get(i, line) for i, line in enumerate(file.lines))
        user = f"Change {noun} {numbers} of {file.name}:\n{numbered(changed)}"
        if index == 0:
            user = f"This is {file.name}:\n{file.fenced()}\n{user}"
        file = replace(file, lines=lines)
        said = f"This is {file.name} with {noun} {numbers} changed:"
        turns.append(Turn(user=user, assistant=f"{said}\n{file.fenced()}"))
    return Session(family="editing", turns=tuple(turns))


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A text file as its lines; `language` is the tag of its code fence."""

    name: str
    language: str
    lines: tuple[str, ...]

    def fenced(self) -> str:
        """The whole file as a Markdown code block, its lines numbered from 1."""
        return f"```{self.language}\n{numbered(dict(enumerate(self.lines)))}\n```"


def numbered(lines: Mapping[int, str]) -> str:
    """Lines by index as `number|text`."""
    return "\n".join(f"{index + 1}|{line}" for index, line in sorted(lines.items()))


# ---- Python modules ----

_NAMES = frozenset((*NOUNS, *QUALITIES, *ASPECTS))


def make_module(rng: Random) -> SourceFile:
    """Some constants and two or three functions, each about a thing of its own."""
    things = rng.sample(NOUNS, rng.randint(2, 3))
    lines = [f"{name.upper()} = {number(rng)}" for name in identifiers(rng, rng.randint(1, 3))]
    for thing in things:
        lines.extend(("", *_function(rng, thing)))
    return SourceFile(f"{rng.choice(NOUNS)}.py", "python", tuple(lines))


def change_module_line(rng: Random, file: SourceFile, index: int) -> str:
    """The line at `index` with another number or another name in it, or commented out."""
    line = file.lines[index]
    numbers = re.findall(r"\d+", line)
    if numbers and rng.random() < 0.6:
        return line.replace(numbers[0], str(number(rng)))
    names = [word for word in re.findall(r"[a-z]+", line) if word in _NAMES]
    if not names:
        return f"# {line}"
    return re.sub(rf"(?<![a-z]){rng.choice(names)}(?![a-z])", rng.choice(NOUNS), line)


def _function(rng: Random, thing: str) -> tuple[str, ...]:
    """A function of three to five lines around `thing`."""
    name = f"{rng.choice(VERBS)}_{thing}"
    aspect = rng.choice(ASPECTS)
    field = f"{rng.choice(QUALITIES)}_{rng.choice(ASPECTS)}"
    amount = number(rng)
    kind = rng.randrange(5)
    if kind == 0:
        return (
            f"def {name}({thing}, {aspect}={amount}):",
            f"    if {thing}.{field} > {aspect}:",
            f'        raise ValueError("{thing} {aspect}")',
            f"    return {thing}.{field}",
        )
    if kind == 1:
        return (
            f"def {name}({thing}s):",
            f"    {field} = {amount}",
            f"    for {thing} in {thing}s:",
            f"        {field} += {thing}.{aspect}",
            f"    return {field}",
        )
    if kind == 2:
        return (
            f"def {name}(path, {aspect}={amount}):",
            f"    with open(path) as {thing}_file:",
            f"        {thing} = {thing}_file.read()",
            f"    return {thing}[:{aspect}]",
        )
    if kind == 3:
        return (
            f"def {name}({thing}):",
            f"    {field} = {thing}.{aspect} * {amount}",
            f"    return {thing}.replace({field}={field})",
        )
    return (
        f"def {name}({thing}s):",
        f"    {field} = [x.{aspect} for x in {thing}s]",
        f"    return sorted({field})[:{amount}]",
    )


# ---- settings files ----

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
