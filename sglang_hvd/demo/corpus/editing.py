"""File editing: each turn changes some lines of a file and the reply repeats the whole file.

The files are generated Python modules and settings files (Python, YAML, TOML). The small target
copies what followed the same three tokens. So no two lines of a file share three tokens in a row
with different ones after them, as far as that can be had.
"""

import re
from collections.abc import Callable, Collection
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
        changed = rng.sample(changeable, rng.choice((1, 1, 1, 2, 3)))
        numbers = ", ".join(str(i + 1) for i in sorted(changed))
        noun = "line" if len(changed) == 1 else "lines"
        shown_before = f"This is {file.name}:\n{file.fenced()}\n" if index == 0 else ""
        for i in changed:
            lines = (*file.lines[:i], change(rng, file, i), *file.lines[i + 1 :])
            file = replace(file, lines=lines)
        user = f"{shown_before}Change {noun} {numbers} of {file.name}:\n{file.around(changed)}"
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
        return "\n".join(self._numbered())

    def around(self, indices: Collection[int]) -> str:
        """The lines at `indices` with the line before and after each, as `fenced` shows them.

        Three dots end each part that the file goes on after.
        """
        numbered = self._numbered()  # the opening fence is line 0
        shown = sorted({i + near for i in indices for near in (0, 1, 2)})
        text = "\n".join(
            numbered[i] if i + 1 in shown or i + 1 == len(numbered) else f"{numbered[i]} ..."
            for i in shown
        )
        return text.replace("| ...", "|...")  # a bar and an indentation are one token

    def words(self) -> set[str]:
        """Its words and numbers that no new line may share."""
        return _words("\n".join(self.lines))

    def _numbered(self) -> list[str]:
        """The opening fence, the lines as `number|text`, and the closing fence."""
        lines = [f"{number}|{line}" for number, line in enumerate(self.lines, 1)]
        return [f"```{self.language}", *lines, "```"]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+|\d+", text.lower())).difference(QUALITIES)


def _unused(draw: Callable[[], str], taken: Collection[str]) -> str:
    """A drawn text without any of the words that are taken."""
    while True:
        text = draw()
        if _words(text).isdisjoint(taken):
            return text


# ---- Python modules ----

_NAMES = frozenset((*NOUNS, *QUALITIES, *ASPECTS))


def make_module(rng: Random) -> SourceFile:
    """Some constants and two or three functions of different kinds, each about its own thing."""
    things = rng.sample(NOUNS, rng.randint(2, 3))
    taken = set(things)

    def unused(draw: Callable[[], str]) -> str:
        text = _unused(draw, taken)
        taken.update(_words(text))
        return text

    lines: list[str] = []
    for _ in range(rng.randint(1, 3)):
        name = unused(lambda: identifier(rng))
        lines.append(f"{name.upper()} = {unused(lambda: str(number(rng)))}")
    verbs, kinds = rng.sample(VERBS, len(things)), rng.sample(range(5), len(things))
    taken.add("path")  # the name of an argument
    for thing, verb, kind in zip(things, verbs, kinds, strict=True):
        aspect = unused(lambda: rng.choice(ASPECTS))
        field = f"{rng.choice(QUALITIES)}_{unused(lambda: rng.choice(ASPECTS))}"
        amount = unused(lambda: str(number(rng)))
        lines.extend(("", *_function(kind, f"{verb}_{thing}", thing, aspect, field, amount)))
    return SourceFile(f"{rng.choice(NOUNS)}.py", "python", tuple(lines))


def change_module_line(rng: Random, file: SourceFile, index: int) -> str:
    """The line at `index` with another number or another name in it, or commented out."""
    line, taken = file.lines[index], file.words()
    numbers = re.findall(r"\d+", line)
    names = [word for word in re.findall(r"[a-z]+", line) if word in _NAMES]
    if numbers and (not names or rng.random() < 0.6):
        return line.replace(numbers[0], _unused(lambda: str(number(rng)), taken))
    if not names:
        return f"# {line}"
    other = _unused(lambda: rng.choice(NOUNS), taken)
    return re.sub(rf"(?<![a-z]){rng.choice(names)}(?![a-z])", other, line)


def _function(
    kind: int, name: str, thing: str, aspect: str, field: str, amount: str
) -> tuple[str, ...]:
    """A function of three to five lines around `thing`. There are five kinds."""
    if kind == 0:
        return (
            f"def {name}({thing}, {aspect}={amount}):",
            f"    if {thing}.{field} > {aspect}:",
            f'        raise ValueError("{thing} {aspect}")',
            f"    return {thing}",
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
    """Two or three sections of keys."""
    language = rng.choice(tuple(_SYNTAX))
    extension, header, line = _SYNTAX[language]
    num_keys = rng.randint(8, 16)
    starts = {0, *rng.sample(range(3, num_keys), rng.randint(1, 2))}
    sections = rng.sample(NOUNS, len(starts))
    taken = set(sections)
    lines: list[str] = []
    for index in range(num_keys):
        if index in starts:
            lines.append(header.format(sections.pop()))
        setting = _unused(lambda: line.format(identifier(rng), _value(rng)), taken)
        taken |= _words(setting)
        lines.append(setting)
    return SourceFile(f"{rng.choice(NOUNS)}.{extension}", language, tuple(lines))


def change_setting(rng: Random, file: SourceFile, index: int) -> str:
    """The line at `index` with another value, another name or commented out."""
    line, taken = file.lines[index], file.words()
    separator = _SYNTAX[file.language][2].strip()[2:-2]
    if separator not in line:
        other = _unused(lambda: rng.choice(NOUNS), taken)
        return line.replace(line.strip("# []:").split()[0], other)
    key, value = line.split(separator, 1)
    kind = rng.random()
    if kind < 0.6:
        return f"{key}{separator}{_unused(lambda: _value(rng), taken)}"
    if kind < 0.85:
        indent = key[: len(key) - len(key.lstrip())]
        return f"{indent}{_unused(lambda: identifier(rng), taken)}{separator}{value}"
    return f"# {line.strip()}"


def _value(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return str(number(rng))
    if kind < 0.75:
        return f'"{rng.choice(COLORS)} {rng.choice(NOUNS)}"'
    return f'"{rng.choice(CITIES)}"'
