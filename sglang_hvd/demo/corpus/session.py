"""A conversation of the demo corpus: what the user says and what a good assistant answers."""

from dataclasses import dataclass
from typing import Literal, get_args

Family = Literal["editing", "tool_calls", "sql", "code", "qa", "chat"]
FAMILIES: tuple[Family, ...] = get_args(Family)


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message and the reference reply, both plain text without chat markup."""

    user: str
    assistant: str


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one conversation, in order."""

    family: Family
    turns: tuple[Turn, ...]
