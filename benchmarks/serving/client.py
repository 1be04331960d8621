"""Plays conversations against a server and records the times: so many at a time, or as they arrive.

It streams from /generate, because streams of the OpenAI API do not say what a request verified.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from benchmarks.workloads.prompts import Prompt
from sglang_hvd.demo.reply_cycles import ReplyCycles
from sglang_hvd.demo.server import ServerFailed


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed reply.

    conversation, turn: index of the conversation, and of the turn in it.
    text: the reply. token_ids: the generated tokens.
    seconds: from the request to the end. ttft: from the request to the first chunk.
    gaps: seconds between tokens after the first chunk. The tokens of a chunk share the time since
        the chunk before it equally.
    counts: counts of its decoding cycles.
    cycles: the cycles, as view.cycles explains them; empty if the server does not report them.
    """

    conversation: int
    turn: int
    text: str
    token_ids: tuple[int, ...]
    seconds: float
    ttft: float
    gaps: tuple[float, ...]
    counts: ReplyCycles
    cycles: tuple[Mapping[str, Any], ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first chunk; None if there was no other."""
        return sum(self.gaps) / len(self.gaps) if self.gaps else None


# Given the answers so far, returns the next request (the body of /generate), or None at the end.
Conversation = Callable[[Sequence[Answer]], dict[str, Any] | None]


def conversation_of(first: Prompt, request: Callable[[Prompt], dict[str, Any]]) -> Conversation:
    """The user's turns, with the server's own answers between them.

    request: the body of /generate for a prompt.
    """

    def next_body(answers: Sequence[Answer]) -> dict[str, Any] | None:
        prompt: Prompt | None = first
        for answer in answers:
            assert prompt is not None, "the conversation has ended"
            prompt = prompt.after(answer.text)
        return None if prompt is None else request(prompt)

    return next_body


@dataclass(frozen=True, slots=True)
class Played:
    """All conversations, played.

    seconds: from the first request to the last answer.
    host_us_per_step: host time of HVD's own code per step, in microseconds; None from a server
        without HVD.
    """

    answers: tuple[Answer, ...]
    seconds: float
    host_us_per_step: float | None


def arrivals(num: int, rate: float, seed: int) -> tuple[float, ...]:
    """When `num` conversations arrive in a Poisson process, in seconds from the start.

    rate: conversations per second.
    """
    return tuple(np.random.default_rng(seed).exponential(1 / rate, num).cumsum().tolist())


def play(
    url: str,
    conversations: Sequence[Conversation],
    *,
    concurrency: int,
    starts: Sequence[float] | None = None,
    so_far: list[Answer] | None = None,
) -> Played:
    """Plays each conversation turn by turn.

    concurrency: so many conversations at a time (closed loop). It is ignored if there are starts.
    starts: seconds after which each conversation begins, however many are running (open loop).
    so_far: receives each answer at once, so that those before a failure are not lost.

    Raises ServerFailed if the server refuses a request or closes the connection.
    """
    try:
        answers = [] if so_far is None else so_far
        return asyncio.run(_play(url, conversations, concurrency, starts, answers))
    except aiohttp.ClientError as error:
        raise ServerFailed(f"{url}: {error or repr(error)}") from error


async def _play(
    url: str,
    conversations: Sequence[Conversation],
    concurrency: int,
    starts: Sequence[float] | None,
    answers: list[Answer],
) -> Played:
    waiting = list(enumerate(conversations))[::-1]
    # No total limit: a request may stream for minutes.
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    # No limit on connections: an open loop must not wait for one. Each serves one request: a server
    # closes idle connections, and a prompt may take longer to be made than it waits.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:

        async def converse(number: int, conversation: Conversation) -> None:
            so_far: list[Answer] = []
            while (body := conversation(so_far)) is not None:
                so_far.append(await _ask(http, url, number, len(so_far), body))
                answers.append(so_far[-1])

        async def worker() -> None:
            while waiting:
                await converse(*waiting.pop())

        async def arrival(number: int, at: float) -> None:
            await asyncio.sleep(start + at - time.perf_counter())
            await converse(number, conversations[number])

        before = await _host_times(http, url)
        start = time.perf_counter()
        if starts is None:
            await asyncio.gather(*(worker() for _ in range(concurrency)))
        else:
            await asyncio.gather(*(arrival(number, at) for number, at in enumerate(starts)))
        seconds = time.perf_counter() - start
        after = await _host_times(http, url)
    host = None
    if before is not None and after is not None and after[0] > before[0]:
        host = (after[1] - before[1]) / (after[0] - before[0])
    answers.sort(key=lambda answer: (answer.conversation, answer.turn))
    return Played(tuple(answers), seconds, host)


async def _ask(
    http: aiohttp.ClientSession, url: str, number: int, turn: int, body: dict[str, Any]
) -> Answer:
    body = {**body, "stream": True}
    start = last = now = time.perf_counter()
    ttft: float | None = None
    gaps: list[float] = []
    num_tokens = 0
    answer: dict[str, Any] = {}
    async with http.post(f"{url}/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            answer = json.loads(line.removeprefix(b"data: "))
            if "error" in answer:
                raise ServerFailed(f"{url}: {answer['error']}")
            now = time.perf_counter()
            num_new = answer["meta_info"]["completion_tokens"] - num_tokens
            if ttft is None:
                ttft = now - start
            elif num_new > 0:
                gaps += [(now - last) / num_new] * num_new
            else:  # the last chunk only says that the reply has ended
                continue
            last, num_tokens = now, num_tokens + num_new
    if ttft is None:
        raise ServerFailed(f"{url}: the server sent no chunk")
    token_ids = tuple(answer["output_ids"])
    [hvd] = answer["meta_info"].get("hvd") or [{}]
    return Answer(
        conversation=number,
        turn=turn,
        text=answer["text"],
        token_ids=token_ids,
        seconds=now - start,
        ttft=ttft,
        gaps=tuple(gaps),
        counts=ReplyCycles.of(answer["meta_info"], len(token_ids)),
        cycles=tuple(hvd.get("cycles", ())),
    )


async def _get(http: aiohttp.ClientSession, url: str) -> Any:
    async with http.get(url) as response:
        response.raise_for_status()
        return await response.json()


async def _host_times(http: aiohttp.ClientSession, url: str) -> tuple[int, float] | None:
    """Steps so far, and microseconds of HVD's host code in them."""
    info = await _get(http, f"{url}/server_info")
    hvd = info["internal_states"][0].get("hvd")
    if hvd is None or not hvd["steps"]["num_steps"]:
        return None if hvd is None else (0, 0.0)
    return hvd["steps"]["num_steps"], hvd["steps"]["num_steps"] * hvd["steps"]["host_us"]
