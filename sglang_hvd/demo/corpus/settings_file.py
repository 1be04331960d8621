"""Generated settings files (Python, YAML, TOML) and their edits."""

from random import Random

from sglang_hvd.demo.corpus.edits import Edit, SourceFile
from sglang_hvd.demo.corpus.words import CITIES, COLORS, NOUNS, identifiers, new_identifier, number

_SYNTAX = {  # language: (extension, section header, line)
    "python": ("py", "# {} settings", "{} = {}"),
    "yaml": ("yaml", "{}:", "  {}: {}"),
    "toml": ("toml", "[{}]", "{} = {}"),
}


def make_settings(rng: Random) -> SourceFile:
    """Two to four sections of keys; no key begins another."""
    language = rng.choice(tuple(_SYNTAX))
    extension, header, line = _SYNTAX[language]
    keys = identifiers(rng, rng.randint(12, 22))
    starts = {0, *rng.sample(range(3, len(keys)), rng.randint(1, 3))}
    sections = iter(rng.sample(NOUNS, len(starts)))
    lines: list[str] = []
    for index, key in enumerate(keys):
        if index in starts:
            lines.append(header.format(next(sections)))
        lines.append(line.format(key, _value(rng)))
    return SourceFile(f"{rng.choice(NOUNS)}.{extension}", language, tuple(lines))


def edit_settings(rng: Random, file: SourceFile) -> Edit:
    """Sets, renames, adds or removes one key."""
    line = _SYNTAX[file.language][2]
    separator = line.strip()[2:-2]
    entries = [i for i, text in enumerate(file.lines) if separator in text]
    keys = [file.lines[i].strip().split(separator)[0] for i in entries]
    choice = rng.randrange(len(entries))
    at, key = entries[choice], keys[choice]
    value = file.lines[at].split(separator, 1)[1]
    before, after = file.lines[:at], file.lines[at + 1 :]
    kind = rng.random()
    if kind < 0.4:
        changed = _value(rng)
        while changed == value:
            changed = _value(rng)
        request = rng.choice(("Set `{}` to `{}`.", "Change `{}` to `{}`."))
        text = line.format(key, changed)
        return Edit(request.format(key, changed), f"Set `{text.strip()}`:", (*before, text, *after))
    name = new_identifier(rng, keys)
    if kind < 0.6:
        text = line.format(name, value)
        names = f"`{key}` to `{name}`"
        return Edit(f"Rename {names}.", f"Renamed {names}:", (*before, text, *after))
    if kind < 0.85:
        text = line.format(name, _value(rng))
        place = f"`{text.strip()}` after `{key}`"
        return Edit(f"Add {place}.", f"Added {place}:", (*before, file.lines[at], text, *after))
    return Edit(f"Remove `{key}`.", f"Removed `{key}`:", (*before, *after))


def _value(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return str(number(rng))
    if kind < 0.75:
        return f'"{rng.choice(COLORS)} {rng.choice(NOUNS)}"'
    return f'"{rng.choice(CITIES)}"'
