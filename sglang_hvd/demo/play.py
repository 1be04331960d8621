"""Plays multi-turn sessions against a server through the OpenAI API."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from sglang_hvd.demo.corpus.session import Session
from sglang_hvd.demo.reply_cycles import ReplyCycles
from sglang_hvd.view.cycles import Cycle

MAX_REPLY_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply and the figures of its decoding.

    Attributes:
        family: workload family of the session.
        question: the last message of the conversation that was sent.
        text: the reply.
        num_tokens: generated tokens.
        seconds: from request to answer, prefill included.
        counts: counts of its decoding cycles.
        cycles: its decoding cycles; empty if the server does not report them.
    """

    family: str
    question: str
    text: str
    num_tokens: int
    seconds: float
    counts: ReplyCycles
    cycles: tuple[Cycle, ...]


def play(url: str, sessions: Iterable[Session]) -> Iterator[Reply]:
    """Play each session turn by turn. The model's own replies become the history."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)
    for session in sessions:
        messages: list[dict[str, str]] = []
        for turn in session.turns:
            messages.append({"role": "user", "content": turn.user})
            reply = _ask(client, session.family, messages)
            yield reply
            messages.append({"role": "assistant", "content": reply.text})


def _ask(client: OpenAI, family: str, messages: list[dict[str, str]]) -> Reply:
    start = time.perf_counter()
    completion = client.chat.completions.create(
        model="demo",
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=MAX_REPLY_TOKENS,
        extra_body={"return_meta_info": True},
    )
    seconds = time.perf_counter() - start
    choice = completion.choices[0]
    assert choice.model_extra is not None
    assert completion.usage is not None
    meta: dict[str, Any] = choice.model_extra["meta_info"]
    num_tokens = completion.usage.completion_tokens
    [hvd] = meta.get("hvd") or [{}]
    return Reply(
        family=family,
        question=messages[-1]["content"],
        text=choice.message.content or "",
        num_tokens=num_tokens,
        seconds=seconds,
        counts=ReplyCycles.of(meta, num_tokens),
        cycles=tuple(map(Cycle.from_report, hvd.get("cycles", []))),
    )
