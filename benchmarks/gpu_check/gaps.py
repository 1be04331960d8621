"""What a device waits for between two steps: stages of the host, and gaps between kernels."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import aiohttp

from benchmarks.gap import SAMPLING, measured, prompts_of, room_flags, row_of
from benchmarks.gpu_check.parts import Row, Unit
from benchmarks.gpu_check.setup import Setup, server_of, setups_of
from benchmarks.trace_serving.gpu_use import GpuUse, profiled
from sglang_hvd.demo.modes import HVD_MODES, Mode
from sglang_hvd.demo.server import SglangServer, flush_cache

# SGLang's own modes, to compare with. They know no setups of HVD, so each runs once.
_OTHERS: tuple[Mode, ...] = ("plain", "eagle3")
_TEXTS = "text", "noise"  # on a GPU every mode samples noise, so that its steps compare
_ROUNDS = 3
_PROFILED_STEPS = 20
_PROFILED_TOKENS = 20 * _PROFILED_STEPS  # a step commits several tokens


def gap_units(options: argparse.Namespace) -> Sequence[Unit]:
    """A unit for each setup and policy, and for each mode without HVD: a server of its own."""
    setups = options.setups or setups_of(options.device)[:1]

    def unit(setup: Setup, mode: Mode) -> Unit:
        return Unit(f"{setup.name}-{mode}", lambda done: _rows(setup, mode, options, done))

    return [
        unit(setup, mode)
        for number, setup in enumerate(setups)
        for mode in (*(() if number else _OTHERS), *options.policies)
        if not setup.refuses(mode)
    ]


def _rows(
    setup: Setup, mode: Mode, options: argparse.Namespace, done: Sequence[Row]
) -> Iterator[Row]:
    known = {(row["text"], row["requests"]) for row in done}
    cells = [(text, num) for num in options.concurrency for text in _TEXTS]
    cells = [cell for cell in cells if cell not in known]
    if not cells:
        return
    more = room_flags(max(options.concurrency), max(options.gap_tokens, _PROFILED_TOKENS))
    if mode in HVD_MODES:
        more += ["--hvd-report-cycles", "false"]
    with server_of(setup, mode, "gap", options, more) as server:
        for text, num in cells:
            rounds = [measured(server, text, num, options.gap_tokens) for _ in range(1 + _ROUNDS)]
            yield {
                "setup": asdict(setup),
                **asdict(row_of(text, num, mode, "here", rounds[1:])),  # the first warms up
                "gpu": _gpu_use(server, text, num, options),
                "passed": True,
            }


def _gpu_use(server: SglangServer, text: str, num: int, options: argparse.Namespace) -> Row | None:
    """Times of the device in a step, by the profiler's timeline of its kernels. None on a CPU, and
    if the profile fails."""
    if options.device == "cpu":
        return None
    sampling = {**SAMPLING[text], "max_new_tokens": _PROFILED_TOKENS, "ignore_eos": True}
    bodies = [{"text": prompt, "sampling_params": sampling} for prompt in prompts_of(text, num)]
    flush_cache(server.url)
    with tempfile.TemporaryDirectory() as folder:
        try:
            used: GpuUse = profiled(server.url, bodies, Path(folder), steps=_PROFILED_STEPS)
        except (RuntimeError, ValueError, aiohttp.ClientError) as error:
            # A failed profile does not discard the measured row.
            print(f"profile: {error}", file=sys.stderr)
            return None
    return asdict(used)
