"""Costs of 8B shapes with random weights, and recorded traffic on them."""

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu_check.parts import Row, Unit, hvd_state, logged_server
from benchmarks.trace_serving.__main__ import options_of as trace_options
from benchmarks.trace_serving.__main__ import serve_traces
from benchmarks.trace_serving.models import write_models
from sglang_hvd.demo.models import DemoModels, demo_models
from sglang_hvd.demo.modes import server_flags
from sglang_hvd.demo.server import CPU_FLAGS
from sglang_hvd.payoff import DEFAULT_PREDICTORS

# The default policy is early, because time may run out.
_TRACE_MODES = ("plain", "eagle3", "allocate", "cache", "payoff", "frequency")
# Memory of an 8B server in 16 bits: weights, KV of 64 requests, workspaces and graphs.
_GB_PER_SERVER = 38
# Share of the memory for weights and KV. The rest is for workspaces and graphs.
_STATIC_SHARE = 0.85
# All modes use the backend whose trees are timed. Prefill graphs take long to capture and do not
# matter here.
_GPU_FLAGS = ("--attention-backend", "flashinfer", "--disable-prefill-cuda-graph")
_GPU_OPTIONS = ("--profile-steps", "20", "--", *_GPU_FLAGS)


def cost_units(options: argparse.Namespace) -> Sequence[Unit]:
    """A unit for each shape: a server that times its steps."""

    def unit(shape: str) -> Unit:
        return Unit(shape, lambda done: () if done else _costs(shape, options))

    return [unit(shape) for shape in options.shapes]


def trace_units(options: argparse.Namespace) -> Sequence[Unit]:
    """Units of benchmarks.trace_serving, in groups of modes that fit into memory together."""

    def unit(shape: str, modes: Sequence[str]) -> Unit:
        return Unit(f"{shape}-{'-'.join(modes)}", lambda done: _traces(shape, modes, options, done))

    groups: Sequence[Sequence[str]]
    if options.device == "cpu":
        groups = [("plain", "payoff")]
    else:
        max_servers = options.servers_at_once
        if max_servers is None:
            memory_gb = torch.cuda.get_device_properties(0).total_memory / 2**30
            max_servers = max(2, int(memory_gb) // _GB_PER_SERVER)
        groups = groups_of_modes(_TRACE_MODES, max_servers)
    return [unit(shape, modes) for shape in options.shapes for modes in groups]


def groups_of_modes(modes: Sequence[str], max_servers: int) -> list[tuple[str, ...]]:
    """Groups of at most max_servers modes, at least two. Every group has EAGLE3, to compare with,
    and also plain serving if it has room for three modes."""
    if max_servers >= len(modes):
        return [tuple(modes)]
    always = ("eagle3",) if max_servers == 2 else ("plain", "eagle3")
    others = [mode for mode in modes if mode not in always]
    room = max_servers - len(always)
    return [(*always, *others[i : i + room]) for i in range(0, len(others), room)]


def _costs(shape: str, options: argparse.Namespace) -> Iterator[Row]:
    *narrow, widest = sorted({1, *options.widths})
    with tempfile.TemporaryDirectory() as folder:
        models = _dummy_models(shape, Path(folder))
        began = time.monotonic()
        with logged_server(
            [
                *server_flags("allocate", models),
                *("--hvd-set", "cost_profile=fresh", "--hvd-verify-width", str(widest)),
                *("--hvd-set", f"narrow_widths={narrow}"),
                *("--load-format", "dummy", *_running(options)),
            ],
            log_file=options.logs / f"costs-{shape}.log",
            device=options.device,
            launch=options.launch,
        ) as server:
            seconds = time.monotonic() - began
            state = hvd_state(server)
            yield {
                "shape": shape,
                "width_memory_gb": state["width_memory_gb"],
                "seconds_to_start": seconds,
                "costs": state["costs"],
                "passed": True,
            }


def _dummy_models(shape: str, folder: Path) -> DemoModels:
    demo = demo_models()
    target, drafter = write_models(shape, folder, num_tokens=2048, context_length=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.target / name, target / name)
    return DemoModels(target, drafter, DEFAULT_PREDICTORS["votes"])


def _running(options: argparse.Namespace) -> list[str]:
    if options.device == "cpu":
        return [*CPU_FLAGS, "--max-running-requests", "4"]
    return [*_GPU_FLAGS, "--max-running-requests", "64", "--mem-fraction-static", "0.6"]


def _traces(
    shape: str, modes: Sequence[str], options: argparse.Namespace, done: Sequence[Row]
) -> Iterator[Row]:
    logs = options.logs / f"traces-{shape}-{'-'.join(modes)}"
    arguments = [
        *("--traces", str(options.traces), "--tokenizer", str(options.tokenizer)),
        *("--shape", shape, "--device", options.device, "--logs", str(logs)),
        *("--concurrency", ",".join(map(str, options.concurrency))),
        *("--modes", ",".join(modes), "--gpu-share", str(_STATIC_SHARE)),
        *(["--files", *options.files] if options.files else []),
        *(_GPU_OPTIONS if options.device == "cuda" else []),
    ]
    known = {(row["workload"], row["concurrency"]) for row in done}
    for cell, rows in serve_traces(trace_options(arguments), without=known, launch=options.launch):
        yield {
            "shape": shape,
            "workload": cell.workload,
            "concurrency": cell.concurrency,
            "modes": [asdict(row) for row in rows],
            "passed": all(row.outputs_identical for row in rows),
        }
    shutil.rmtree(logs, ignore_errors=True)
