"""How much of a decode step a server's GPU works, and how long it waits, by SGLang's profiler."""

import gzip
import json
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.client import Conversation, play

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# A shorter gap between two kernels is how long the next takes to begin; in a longer one the GPU
# waits for the host.
_LEAST_WAIT_US = 50
# The first prefills are none of the steps.
_SECONDS_BEFORE = 0.5
_SECONDS_TO_WRITE = 60


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Milliseconds of a step: from the first kernel to the last, with any kernel at work, and in
    gaps of 50 microseconds and more."""

    step_ms: float
    busy_ms: float
    waiting_ms: float


def profiled(
    url: str, conversations: Sequence[Conversation], folder: Path, *, concurrency: int, steps: int
) -> GpuUse:
    """Plays these, and profiles so many steps of them.

    folder: an empty one, which the server writes to.
    Raises RuntimeError if no profile is written, as of too few steps, and ValueError as gpu_use.
    """
    player = threading.Thread(
        target=play, args=(url, conversations), kwargs={"concurrency": concurrency}
    )
    player.start()
    time.sleep(_SECONDS_BEFORE)
    _post(
        f"{url}/start_profile",
        {
            "output_dir": str(folder),
            "num_steps": steps,
            "activities": ["GPU"],
            "with_stack": False,
        },
    )
    player.join()
    deadline = time.monotonic() + _SECONDS_TO_WRITE
    while True:
        for path in folder.glob("*.trace.json.gz"):
            try:
                return gpu_use(path, steps)
            except (EOFError, json.JSONDecodeError):
                pass  # it is being written
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url}: no profile of {steps} steps")
        time.sleep(0.5)


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


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()
