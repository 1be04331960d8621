"""File editing: the prompt holds a file, each turn changes some lines, replies hold all of it."""

from dataclasses import replace
from random import Random

from sglang_hvd.demo.corpus.edits import numbered
from sglang_hvd.demo.corpus.module_file import change_module_line, make_module
from sglang_hvd.demo.corpus.session import Session, Turn
from sglang_hvd.demo.corpus.settings_file import change_setting, make_settings


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
