"""File editing: the prompt holds the file; replies hold all of it, or SEARCH/REPLACE blocks."""

from dataclasses import replace
from random import Random

from sglang_hvd.demo.corpus.edits import search_replace
from sglang_hvd.demo.corpus.module_file import edit_module, make_module
from sglang_hvd.demo.corpus.session import Session, Turn
from sglang_hvd.demo.corpus.settings_file import edit_settings, make_settings


def make_session(rng: Random) -> Session:
    """Three or four edits of one file; the form of the replies stays the same."""
    is_settings = rng.random() < 0.6
    returns_whole_file = rng.random() < 0.75
    file = make_settings(rng) if is_settings else make_module(rng)
    turns: list[Turn] = []
    for index in range(rng.randint(3, 4)):
        edit = (edit_settings if is_settings else edit_module)(rng, file)
        edited = replace(file, lines=edit.lines)
        if index == 0:
            form = "Return the whole file." if returns_whole_file else "Use SEARCH/REPLACE blocks."
            user = f"This is {file.name}:\n{file.fenced()}\n{edit.request} {form}"
        else:
            start = rng.choice(("Now", "Next,", "Then"))
            user = f"{start} {edit.request[0].lower()}{edit.request[1:]}"
        body = edited.fenced() if returns_whole_file else search_replace(file.lines, edit.lines)
        turns.append(Turn(user=user, assistant=f"{edit.summary}\n{body}"))
        file = edited
    return Session(family="editing", turns=tuple(turns))
