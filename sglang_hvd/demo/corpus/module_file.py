"""Generated Python modules and changes of their lines."""

import re
from random import Random

from sglang_hvd.demo.corpus.edits import SourceFile
from sglang_hvd.demo.corpus.words import ASPECTS, NOUNS, QUALITIES, VERBS, identifiers, number


def make_module(rng: Random) -> SourceFile:
    """Some constants and two or three functions, each about a thing of its own."""
    things = rng.sample(NOUNS, rng.randint(2, 3))
    lines = [f"{name.upper()} = {number(rng)}" for name in identifiers(rng, rng.randint(1, 3))]
    for thing in things:
        lines.extend(("", *_function(rng, thing)))
    return SourceFile(f"{rng.choice(NOUNS)}.py", "python", tuple(lines))


def change_module_line(rng: Random, file: SourceFile, index: int) -> str:
    """The line at `index` with another number or another name in it."""
    line = file.lines[index]
    numbers = re.findall(r"\d+", line)
    if numbers and rng.random() < 0.6:
        return line.replace(numbers[0], str(number(rng)))
    words = re.findall(r"[a-z]{4,}", line)
    return line.replace(rng.choice(words), rng.choice(NOUNS)) if words else f"# {line}"


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
