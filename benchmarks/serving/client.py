"""Plays sessions against a server through the OpenAI API, so many at once, and keeps the times."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from sglang_hvd.demo.corpus.session import Session


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed reply.

    session, turn: which of the sessions played, and which of its turns.
    text: the reply. num_tokens: generated.
    seconds: from the request to the end. ttft: to the first chunk.
    gaps: seconds between chunks.
    num_cycles: decoding cycles behind the prefill; a server without speculation reports none: each
        token is one.
    num_accepted: accepted draft tokens.
    num_cache_cycles: cycles that verified a cache draft, alone or with the model drafter's.
    """

    session: int
    turn: int
    text: str
    num_tokens: int
    seconds: float
    ttft: float
    gaps: tuple[float, ...]
    num_cycles: int
    num_accepted: int
    num_cache_cycles: int


@dataclass(frozen=True, slots=True)
class Played:
    """seconds: from the first request to the last answer.
    host_us_per_step: of HVD's own code; None from a server without it."""

    answers: tuple[Answer, ...]
    seconds: float
    host_us_per_step: float | None


def play(url: str, sessions: Sequence[Session], *, concurrency: int, max_tokens: int) -> Played:
    """Plays each session turn by turn, `concurrency` sessions at a time."""
    return asyncio.run(_play(url, sessions, concurrency, max_tokens))


async def _play(url: str, sessions: Sequence[Session], concurrency: int, max_tokens: int) -> Played:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)
    model = (await client.models.list()).data[0].id
    waiting = list(enumerate(sessions))[::-1]
    answers: list[Answer] = []

    async def worker() -> None:
        while waiting:
            number, session = waiting.pop()
            messages: list[dict[str, str]] = []
            for turn, said in enumerate(session.turns):
                messages.append({"role": "user", "content": said.user})
                answer = await _ask(client, model, number, turn, messages, max_tokens)
                messages.append({"role": "assistant", "content": answer.text})
                answers.append(answer)

    before = await _host_times(url)
    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    seconds = time.perf_counter() - start
    after = await _host_times(url)
    await client.close()
    host = None
    if before is not None and after is not None and after[0] > before[0]:
        host = (after[1] - before[1]) / (after[0] - before[0])
    answers.sort(key=lambda answer: (answer.session, answer.turn))
    return Played(tuple(answers), seconds, host)


async def _ask(
    client: AsyncOpenAI,
    model: str,
    number: int,
    turn: int,
    messages: list[dict[str, str]],
    max_tokens: int,
) -> Answer:
    start = last = time.perf_counter()
    ttft: float | None = None
    gaps, pieces, meta, usage = [], [], {}, None
    stream = await client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_meta_info": True},
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        if not chunk.choices:
            continue
        [choice] = chunk.choices
        meta = (choice.model_extra or {}).get("meta_info") or meta
        now = time.perf_counter()
        if ttft is None:
            ttft = last = now
        if not choice.delta.content:
            continue
        if pieces:
            gaps.append(now - last)
        last = now
        pieces.append(choice.delta.content)
    assert ttft is not None, "the server sent no chunk"
    assert usage is not None, "the server was asked for usage and sent none"
    hvd: dict[str, Any] = meta.get("hvd") or {}
    num_tokens = usage.completion_tokens
    return Answer(
        session=number,
        turn=turn,
        text="".join(pieces),
        num_tokens=num_tokens,
        seconds=time.perf_counter() - start,
        ttft=ttft - start,
        gaps=tuple(gaps),
        num_cycles=meta.get("spec_verify_ct", max(num_tokens - 1, 1)),
        num_accepted=meta.get("spec_num_correct_drafts", 0),
        num_cache_cycles=hvd.get("num_cache_cycles", 0) + hvd.get("num_both_cycles", 0),
    )


async def _host_times(url: str) -> tuple[int, float] | None:
    """Steps so far and the microseconds that HVD's host code took in them."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/server_info") as response:
        info = await response.json()
    hvd = info["internal_states"][0].get("hvd")
    if hvd is None or not hvd["steps"]["num_steps"]:
        return None if hvd is None else (0, 0.0)
    return hvd["steps"]["num_steps"], hvd["steps"]["num_steps"] * hvd["steps"]["host_us"]
