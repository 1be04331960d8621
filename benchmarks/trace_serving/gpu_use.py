"""How much of a decode step a server's GPU works, and how long it waits, by SGLang's profiler."""

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
# A shorter gap between two kernels is how long the next takes to begin; in a longer one the GPU
# waits for the host.
_LEAST_WAIT_US = 50
_SECONDS_TO_WRITE = 60
_ACTIVITIES = ("GPU",)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Milliseconds of a step: from the first kernel to the last, with any kernel at work, and in
    gaps of 50 microseconds and more. Of so many steps one gap less is between them."""

    step_ms: float
    busy_ms: float
    waiting_ms: float


def profiled(url: str, bodies: Sequence[dict[str, Any]], folder: Path, *, steps: int) -> GpuUse:
    """Generates for all of these at once and profiles so many decode steps of them.

    bodies: of /generate, each of a reply of more tokens than the steps bring.
    folder: an empty one, which the server writes to.
    Raises RuntimeError if no profile is written, as of too few steps, ValueError as gpu_use, and
    what aiohttp raises.
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
            for event in began:  # prefills are none of the steps
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
                    pass  # it is being written
            await asyncio.sleep(0.5)
        await _stop(http, url)
        raise RuntimeError(f"{url}: no profile of {steps} steps")


async def _stop(http: aiohttp.ClientSession, url: str) -> None:
    """Ends a profile, if one is made: what is served next would run under it."""
    async with http.post(f"{url}/stop_profile", raise_for_status=False):
        pass


async def _generate(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], began: asyncio.Event
) -> None:
    """began: set with the reply's first token, or when there will be none."""
    try:
        async with http.post(f"{url}/generate", json={**body, "stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    began.set()
    finally:
        began.set()


def gpu_use(path: Path, steps: int) -> GpuUse:
    """Of a trace in Chrome's format, as torch's profiler writes it. Raises ValueError if nothing
    ran on a GPU, and EOFError if the file does not end."""
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
        waiting_ms=float(gaps[gaps >= _LEAST_WAIT_US].sum() * in_ms),
    )
