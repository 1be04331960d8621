"""Measures how long a server's GPU works and waits in a decode step, with SGLang's profiler."""

import asyncio
import gzip
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# In a gap of at least this length between two kernels the GPU waits for the host. Shorter gaps are
# the time that a kernel needs to start.
_MIN_WAIT_US = 50
_SECONDS_TO_WRITE = 60
_ACTIVITIES = ("GPU",)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Mean times of a step, in milliseconds.

    step_ms: from the first kernel to the last.
    busy_ms: time in which a kernel runs.
    waiting_ms: time in gaps of at least 50 microseconds. The gap after the last step is missing.
    """

    step_ms: float
    busy_ms: float
    waiting_ms: float


def profiled(url: str, bodies: Sequence[dict[str, Any]], folder: Path, *, steps: int) -> GpuUse:
    """Sends all requests at once and profiles `steps` decode steps.

    bodies: requests to /generate. Their replies must be longer than what the steps generate.
    folder: an empty folder, into which the server writes.

    Raises RuntimeError if no profile is written, for example because of too few steps, ValueError
    as gpu_use does, and what aiohttp raises.
    """
    return asyncio.run(_profiled(url, bodies, folder, steps))


async def _profiled(url: str, bodies: Sequence[dict[str, Any]], folder: Path, steps: int) -> GpuUse:
    asked = {
        "output_dir": str(folder),
        "num_steps": steps,
        "activities": _ACTIVITIES,
        "with_stack": False,
    }
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as http:
        began = [asyncio.Event() for _ in bodies]
        replies = [
            asyncio.create_task(_generate(http, url, body, event))
            for body, event in zip(bodies, began, strict=True)
        ]
        try:
            for event in began:  # prefills must not count as steps
                await event.wait()
            for reply in replies:
                if reply.done():
                    reply.result()  # raises what it raised
            async with http.post(f"{url}/start_profile", json=asked):
                await asyncio.gather(*replies)
        except aiohttp.ClientError:
            await _stop(http, url)
            raise
        finally:
            for reply in replies:
                reply.cancel()
        deadline = time.monotonic() + _SECONDS_TO_WRITE
        while time.monotonic() < deadline:
            for path in folder.glob("*.trace.json.gz"):
                try:
                    return gpu_use(path, steps)
                except (EOFError, json.JSONDecodeError):
                    pass  # the server is still writing it
            await asyncio.sleep(0.5)
        await _stop(http, url)
        raise RuntimeError(f"{url}: the server wrote no profile of {steps} steps")


async def _stop(http: aiohttp.ClientSession, url: str) -> None:
    """Stops a running profile, which would affect what is served next."""
    async with http.post(f"{url}/stop_profile", raise_for_status=False):
        pass


async def _generate(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], began: asyncio.Event
) -> None:
    """began: set at the reply's first token, or when it is clear that there is none."""
    try:
        async with http.post(f"{url}/generate", json={**body, "stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    began.set()
    finally:
        began.set()


def gpu_use(path: Path, steps: int) -> GpuUse:
    """GPU use by a trace in Chrome's format, which torch's profiler writes.

    Raises ValueError if nothing ran on a GPU, and EOFError if the file is incomplete.
    """
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    spans = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in _ON_DEVICE
    ]
    if not spans:
        raise ValueError(f"{path}: nothing ran on a GPU")
    begins, ends = np.array(sorted(spans)).T
    last_end = np.maximum.accumulate(ends)
    gaps = np.maximum(begins[1:] - last_end[:-1], 0.0)
    total = last_end[-1] - begins[0]
    in_ms = 1 / (1000 * steps)
    return GpuUse(
        step_ms=float(total * in_ms),
        busy_ms=float((total - gaps.sum()) * in_ms),
        waiting_ms=float(gaps[gaps >= _MIN_WAIT_US].sum() * in_ms),
    )
