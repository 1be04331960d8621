"""Draws sessions for training and for measuring from streams that never meet."""

import hashlib
from collections.abc import Callable
from random import Random

from sglang_hvd.demo.corpus import chat, code, editing, sql, tool_calls
from sglang_hvd.demo.corpus.session import Family, Session

_MAKERS: dict[Family, Callable[[Random], Session]] = {
    "editing": editing.make_session,
    "tool_calls": tool_calls.make_session,
    "sql": sql.make_session,
    "code": code.make_session,
    "qa": chat.make_qa_session,
    "chat": chat.make_chat_session,
}


def train_sessions(family: Family, *, count: int, seed: int) -> list[Session]:
    """`count` sessions to train on; none can come out of `demo_sessions`, whatever the seeds."""
    return _draw(family, count, seed, is_measured=False)


def demo_sessions(family: Family, *, count: int, seed: int) -> list[Session]:
    """`count` sessions to measure on, unseen in training."""
    return _draw(family, count, seed, is_measured=True)


def _draw(family: Family, count: int, seed: int, *, is_measured: bool) -> list[Session]:
    rng = Random(f"{family} {'measured' if is_measured else 'train'} {seed}")
    sessions: list[Session] = []
    while len(sessions) < count:
        session = _MAKERS[family](rng)
        if _is_measured(session) == is_measured:
            sessions.append(session)
    return sessions


def _is_measured(session: Session) -> bool:
    """One session in four, chosen by its text: equal sessions always fall on the same side."""
    text = "\0".join(part for turn in session.turns for part in (turn.user, turn.assistant))
    return hashlib.sha256(text.encode()).digest()[0] % 4 == 0
