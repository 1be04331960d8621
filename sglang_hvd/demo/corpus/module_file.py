"""Generated Python modules and their edits."""

from random import Random

from sglang_hvd.demo.corpus.edits import Edit, SourceFile
from sglang_hvd.demo.corpus.words import ASPECTS, NOUNS, QUALITIES, VERBS, identifiers, number


def make_module(rng: Random) -> SourceFile:
    """Some constants and three to five functions, each about a thing of its own."""
    things = rng.sample(NOUNS, rng.randint(3, 5))
    lines = [f"{name.upper()} = {number(rng)}" for name in identifiers(rng, rng.randint(1, 3))]
    for thing in things:
        lines.extend(("", *_function(rng, thing)))
    return SourceFile(f"{rng.choice(NOUNS)}.py", "python", tuple(lines))


def edit_module(rng: Random, file: SourceFile) -> Edit:
    """Changes a constant, renames a function, adds a statement or removes a function."""
    lines = file.lines
    kind = rng.random()
    functions = [i for i, line in enumerate(lines) if line.startswith("def ")]
    if kind < 0.3:
        at = rng.choice([i for i, line in enumerate(lines) if " = " in line and line[0].isupper()])
        name, value = lines[at].split(" = ")
        changed = number(rng)
        while str(changed) == value:
            changed = number(rng)
        text = f"{name} = {changed}"
        return Edit(f"Set `{name}` to `{changed}`.", f"Set `{text}`:", _put(lines, at, text))
    at = rng.choice(functions)
    name = lines[at][4 : lines[at].index("(")]
    if kind < 0.6 or (kind >= 0.85 and len(functions) < 3):
        verb, thing = name.split("_")
        changed_name = f"{rng.choice([v for v in VERBS if v != verb])}_{thing}"
        text = lines[at].replace(name, changed_name)
        names = f"`{name}` to `{changed_name}`"
        return Edit(f"Rename {names}.", f"Renamed {names}:", _put(lines, at, text))
    if kind < 0.85:
        statement = rng.choice(
            (f'print("{name}")', f'log.{rng.choice(("info", "debug"))}("{name} starts")')
        )
        place = f"`{statement}` to the start of `{name}`"
        return Edit(
            f"Add {place}.",
            f"Added {place}:",
            (*lines[: at + 1], f"    {statement}", *lines[at + 1 :]),
        )
    end = at + 1
    while end < len(lines) and lines[end]:
        end += 1
    return Edit(
        f"Remove the function `{name}`.", f"Removed `{name}`:", (*lines[: at - 1], *lines[end:])
    )


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


def _put(lines: tuple[str, ...], index: int, line: str) -> tuple[str, ...]:
    return (*lines[:index], line, *lines[index + 1 :])
