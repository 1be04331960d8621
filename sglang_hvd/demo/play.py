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
        prompt: the conversation that was sent, as text.
        question: its last message.
        text: the reply.
        token_ids: generated tokens, the end-of-turn token included.
        seconds: from request to answer, prefill included.
        counts: counts of its decoding cycles.
        cycles: its decoding cycles; empty if the server does not report them.
    """

    family: str
    prompt: str
    question: str
    text: str
    token_ids: tuple[int, ...]
    seconds: float
    counts: ReplyCycles
    cycles: tuple[Cycle, ...]

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids)


def asked(reply: Reply) -> str:
    """Its question in one line, from the last line on that begins with a capital letter."""
    lines = reply.question.splitlines()
    first = max((place for place, line in enumerate(lines) if line[:1].isupper()), default=0)
    return " ".join(lines[first:])


def play(url: str, sessions: Iterable[Session]) -> Iterator[Reply]:
    """Play each session turn by turn. The model's own replies become the history."""
    # A connection for each request: the server closes idle ones after some seconds, and other modes
    # play meanwhile, so a request could meet one that is being closed.
    client = OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        timeout=600,
        max_retries=0,
        default_headers={"Connection": "close"},
    )
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
        extra_body={"return_meta_info": True, "return_token_ids": True},
    )
    seconds = time.perf_counter() - start
    choice = completion.choices[0]
    assert choice.model_extra is not None
    meta: dict[str, Any] = choice.model_extra["meta_info"]
    token_ids = tuple(choice.model_extra["response_token_ids"])
    [hvd] = meta.get("hvd") or [{}]
    return Reply(
        family=family,
        prompt="\n".join(f"{message['role']}: {message['content']}" for message in messages),
        question=messages[-1]["content"],
        text=choice.message.content or "",
        token_ids=token_ids,
        seconds=seconds,
        counts=ReplyCycles.of(meta, len(token_ids)),
        cycles=tuple(map(Cycle.from_report, hvd.get("cycles", []))),
    )
