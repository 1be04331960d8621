"""Plays sessions against a server, so many at once, and keeps the times.

It streams from /generate: what a request verified is not told to the OpenAI API's streams. Prompts
are rendered by the chat template of the server's tokenizer.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import aiohttp
from transformers import AutoTokenizer

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
    waiting = list(enumerate(sessions))[::-1]
    answers: list[Answer] = []
    # A request that is streamed for minutes is no fault.
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        info = await _get(http, f"{url}/model_info")
        tokenizer = _tokenizer(info["tokenizer_path"])

        async def worker() -> None:
            while waiting:
                number, session = waiting.pop()
                messages: list[dict[str, str]] = []
                for turn, said in enumerate(session.turns):
                    messages.append({"role": "user", "content": said.user})
                    prompt = tokenizer.apply_chat_template(
                        messages, tokenize=False, add_generation_prompt=True
                    )
                    answer = await _ask(http, url, number, turn, prompt, max_tokens)
                    messages.append({"role": "assistant", "content": answer.text})
                    answers.append(answer)

        before = await _host_times(http, url)
        start = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        seconds = time.perf_counter() - start
        after = await _host_times(http, url)
    host = None
    if before is not None and after is not None and after[0] > before[0]:
        host = (after[1] - before[1]) / (after[0] - before[0])
    answers.sort(key=lambda answer: (answer.session, answer.turn))
    return Played(tuple(answers), seconds, host)


async def _ask(
    http: aiohttp.ClientSession, url: str, number: int, turn: int, prompt: str, max_tokens: int
) -> Answer:
    body = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens},
        "stream": True,
    }
    start = last = time.perf_counter()
    ttft: float | None = None
    gaps: list[float] = []
    answer: dict[str, Any] = {}
    async with http.post(f"{url}/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            answer = json.loads(line.removeprefix(b"data: "))
            if "error" in answer:
                raise RuntimeError(f"{url}: {answer['error']}")
            now = time.perf_counter()
            if ttft is None:
                ttft = now - start
            else:
                gaps.append(now - last)
            last = now
    if ttft is None:
        raise RuntimeError(f"{url}: the server sent no chunk")
    meta: dict[str, Any] = answer["meta_info"]
    [hvd] = meta.get("hvd") or [{}]
    num_tokens = meta["completion_tokens"]
    return Answer(
        session=number,
        turn=turn,
        text=answer["text"],
        num_tokens=num_tokens,
        seconds=last - start,
        ttft=ttft,
        gaps=tuple(gaps),
        num_cycles=meta.get("spec_verify_ct", max(num_tokens - 1, 1)),
        num_accepted=meta.get("spec_num_correct_drafts", 0),
        num_cache_cycles=hvd.get("num_cache_cycles", 0) + hvd.get("num_both_cycles", 0),
    )


@cache
def _tokenizer(path: str) -> Any:
    return AutoTokenizer.from_pretrained(path)


async def _get(http: aiohttp.ClientSession, url: str) -> Any:
    async with http.get(url) as response:
        response.raise_for_status()
        return await response.json()


async def _host_times(http: aiohttp.ClientSession, url: str) -> tuple[int, float] | None:
    """Steps so far and the microseconds that HVD's host code took in them."""
    info = await _get(http, f"{url}/server_info")
    hvd = info["internal_states"][0].get("hvd")
    if hvd is None or not hvd["steps"]["num_steps"]:
        return None if hvd is None else (0, 0.0)
    return hvd["steps"]["num_steps"], hvd["steps"]["num_steps"] * hvd["steps"]["host_us"]
