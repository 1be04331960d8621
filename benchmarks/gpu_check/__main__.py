"""Checks that need a GPU: identity with graphs and overlap, costs of 8B shapes, recorded traffic.

    python -m benchmarks.gpu_check --out DIR [--parts memory,costs,identity,gap,sampling,traces]
        [--traces DIR --tokenizer FILE] [--minutes M] [--device cuda|cpu]

The models are built here: the demo pair, and 8B shapes with random weights. Building the demo pair
takes minutes, unless ~/.cache/sglang_hvd has it; it may come from another machine with the same
sources.

Each part writes DIR/PART.json when it ends, and does not run again while that file exists. A part
that was interrupted, by --minutes or otherwise, or in which a server failed, continues where it
stopped. Until then its rows are in DIR/PART.rows.jsonl, and logs of servers that failed or were
interrupted are in DIR/logs. Another kind of GPU, or options that change the results, need another
DIR. The exit code is 1 if a part failed or has not ended. On a CPU (--device cpu) the same parts
run small and without graphs, which is how they are tested.

If time is short, run `--parts memory,costs --shapes llama-3.1-8b` first. Then run `--parts identity
--policies allocate` with some of --setups (--list-setups prints them), then `--parts traces --files
NAME --concurrency 1,32`. The first start on a machine is slow, because FlashInfer and SGLang
compile kernels. $SGLANG_CACHE_DIR and SGLang's own $SGLANG_JIT_CACHE_DIR keep these kernels.

Parts run in the order in which they are given. Whether steps may run ahead, how long the GPU waits,
and then what the time allows:

    --minutes 8 --parts identity,gap,traces,costs --policies allocate --concurrency 1,8,32
        --setups flashinfer-tree,flashinfer-ahead,chosen-ahead,triton-ahead --shapes llama-3.1-8b

memory: runs the kernels that lay verify trees out and move accepted paths under compute-sanitizer,
    and compares them with torch. Runs without the sanitizer if it cannot use the device. A CPU has
    no kernels to compare.
costs: the server times what steps of the shapes cost before it serves: verifications of each width,
    and the memory that each width needs. Width 1 is nearly a plain step. The gap between steps is
    not included.
identity: compares every policy's greedy output with plain serving on the demo pair, for several
    attention backends, graphs, overlap scheduling, trees and chains, changing widths, and
    concurrencies. For a token that differs, it shows the gap between the two log probabilities in
    plain serving. In bfloat16 some logits tie: such a difference has a small gap, but still counts.
    A server that does not start is a problem in its row.
gap: measures what a device waits for between two steps of the demo pair: the stages of the host
    (benchmarks.gap) and, on a GPU, the gaps between kernels by the profiler. Serves SGLang's plain
    and EAGLE3 modes and --policies, in the first of --setups or all that are given.
sampling: compares outcomes of sampled replies with plain serving by a chi-square test, which must
    also detect another temperature. Without --setups it uses one setup of each attention backend.
traces: runs benchmarks.trace_serving on the shapes, in groups of modes that fit into memory
    together. On a GPU all modes use FlashInfer and no prefill graphs.
"""

import argparse
import contextlib
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import counts, parser_of, run
from benchmarks.gpu import check_gpu
from benchmarks.gpu_check.gaps import gap_units
from benchmarks.gpu_check.identity import Identity
from benchmarks.gpu_check.kernels import SANITIZER, kernel_units
from benchmarks.gpu_check.parts import PartFile, Unit
from benchmarks.gpu_check.sampling import sampling_units
from benchmarks.gpu_check.setup import POLICIES, setups_of
from benchmarks.gpu_check.shapes import cost_units, trace_units
from benchmarks.trace_serving.models import SHAPES
from sglang_hvd.commands.arguments import count, not_negative
from sglang_hvd.demo.server import Launch
from sglang_hvd.replay.core.recordings import find_recordings


def main(arguments: Sequence[str] | None = None, *, launch: Launch | None = None) -> int:
    """launch: starts the servers; None: they are child processes."""
    options = _options(arguments)
    options.launch = launch
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    machine = _machine(options.device)
    has_failed = False
    for name in options.parts:
        try:
            part = PartFile(options.out, name, {**machine, **_settings(name, options)})
            passed = _run(name, part, options, deadline)
        except ValueError as error:  # the other parts still run
            print(f"{name}: {error}")
            passed = None
        has_failed |= not passed
    return int(has_failed)


def _run(name: str, part: PartFile, options: argparse.Namespace, deadline: float) -> bool | None:
    """Whether the part passed; None if it has not ended."""
    with _PARTS[name](options) as units:
        passed = part.passed(units)
        if passed is not None:
            outcome = "passed" if passed else f"FAILED; to run it again, remove {part.path}"
            print(f"{name}: has already run, {outcome}")
            return passed
        began = time.monotonic()
        passed = part.run(units, deadline=deadline, show=_show)
    seconds = time.monotonic() - began
    if passed is None:
        print(f"{name}: not finished after {seconds:.0f} s; run this command again to continue")
    else:
        print(f"{name}: {'passed' if passed else 'FAILED'} in {seconds:.0f} s, {part.path}")
    return passed


# Options that change a part's rows and are not in the names of its units.
_SETTINGS = {
    "memory": (),
    "costs": ("widths",),
    "identity": ("prompts", "concurrency"),
    "gap": ("concurrency", "gap_tokens"),
    "sampling": ("samples",),
    "traces": ("files", "concurrency"),
}


def _settings(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """All options that change the results of a part."""
    settings = {name: str(getattr(options, name)) for name in ("device", *_SETTINGS[part])}
    if part == "traces":
        settings["recordings"] = str([found.name for found in find_recordings(options.traces)])
    return settings


def _show(line: str) -> None:
    print(f"  {line}", flush=True)


@contextlib.contextmanager
def _identity(options: argparse.Namespace) -> Iterator[Sequence[Unit]]:
    with Identity(options) as identity:
        yield identity.units()


_PARTS: dict[str, Callable[[argparse.Namespace], AbstractContextManager[Sequence[Unit]]]] = {
    "memory": lambda options: contextlib.nullcontext(kernel_units(options.device)),
    "costs": lambda options: contextlib.nullcontext(cost_units(options)),
    "identity": _identity,
    "gap": lambda options: contextlib.nullcontext(gap_units(options)),
    "sampling": lambda options: contextlib.nullcontext(sampling_units(options)),
    "traces": lambda options: contextlib.nullcontext(trace_units(options)),
}


def _machine(device: str) -> dict[str, str]:
    machine = {name: version(name) for name in ("sglang", "torch")}
    machine["python"] = platform.python_version()
    if device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        machine["driver"] = subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.strip()
    return machine


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("gpu_check", "Run the checks that need a GPU.")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), metavar="DIR")
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        help=f"comma-separated, some of {','.join(_PARTS)} (default: all that can run)",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--traces", type=Path, metavar="DIR")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE")
    parser.add_argument("--files", nargs="+", metavar="NAME", help="use these recordings only")
    parser.add_argument(
        "--prompts", type=count, default=36, help="number of prompts of the identity part"
    )
    parser.add_argument("--concurrency", type=counts, default=[1, 2, 8, 32])
    parser.add_argument(
        "--shapes",
        type=lambda text: text.split(","),
        default=["llama-3.1-8b", "qwen3-8b"],
        help=f"comma-separated, some of {','.join(SHAPES)} (default: the 8B shapes)",
    )
    parser.add_argument("--widths", type=counts, default=[2, 4, 8, 16, 32, 64])
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default=list(POLICIES),
        help="policies of the parts identity, gap and sampling (default: all)",
    )
    parser.add_argument(
        "--samples",
        type=count,
        default=4000,
        help="samples of each prompt in the sampling part (default: %(default)s)",
    )
    parser.add_argument(
        "--gap-tokens",
        type=count,
        default=160,
        help="tokens of each reply in the gap part (default: %(default)s)",
    )
    parser.add_argument(
        "--setups",
        type=lambda text: text.split(","),
        help="setups of the parts identity, gap and sampling, by name or number (default: all, and "
        "the first for the gap)",
    )
    parser.add_argument(
        "--list-setups",
        action="store_true",
        help="print numbers, names and flags of the device's setups under policy allocate, and "
        "exit; without a GPU, print those of Hopper",
    )
    parser.add_argument(
        "--servers-at-once",
        type=count,
        help="servers of the traces part that run together (default: as many as fit)",
    )
    parser.add_argument(
        "--minutes",
        type=not_negative,
        default=float("inf"),
        help="start nothing new after so many minutes (default: no limit)",
    )
    options = parser.parse_args(arguments)
    setups = setups_of(options.device)
    if options.list_setups:
        for number, setup in enumerate(setups):
            flags = [*setup.flags(options.device), *setup.hvd_flags("allocate")]
            print(f"{number} {setup.name}: {shlex.join(flags)}")
        parser.exit()
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out: {options.out} is not a folder")
    options.logs = options.out / "logs"
    by_name = {setup.name: setup for setup in setups}
    numbered = {str(number): name for number, name in enumerate(by_name)}
    options.setups = options.setups and [numbered.get(key, key) for key in options.setups]
    for name, known in (
        ("parts", _PARTS),
        ("policies", POLICIES),
        ("setups", by_name),
        ("shapes", SHAPES),
    ):
        unknown = sorted(set(getattr(options, name) or known) - set(known))
        if unknown:
            parser.error(f"--{name}: {', '.join(unknown)}: unknown, choose from {', '.join(known)}")
    if options.device == "cuda":
        check_gpu()
    if options.setups is not None:
        options.setups = [by_name[name] for name in dict.fromkeys(options.setups)]
    if options.servers_at_once is not None and options.servers_at_once < 2:
        parser.error("--servers-at-once: give 2 or more, or nothing can be compared")
    missing = {}
    if options.device == "cuda" and shutil.which(SANITIZER) is None:
        missing["memory"] = f"{SANITIZER} of the CUDA toolkit on the PATH"
    if options.traces is None or options.tokenizer is None:
        missing["traces"] = "--traces and --tokenizer"
    for part, needed in missing.items():
        if options.parts is None:
            print(f"{part}: left out, it needs {needed}")
        elif part in options.parts:
            parser.error(f"--parts: {part} needs {needed}")
    options.parts = options.parts or [part for part in _PARTS if part not in missing]
    return options


if __name__ == "__main__":
    run(main)
