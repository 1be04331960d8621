"""What only a GPU shows: identity under graphs and overlap, costs of 8B shapes, recorded traffic.

    python -m benchmarks.gpu_check --out DIR [--parts memory,costs,identity,sampling,traces]
        [--traces DIR --tokenizer FILE] [--minutes M] [--device cuda|cpu]

Models are made here: the demo pair, which takes minutes unless ~/.cache/sglang_hvd has it, perhaps
from another machine with the same sources, and 8B shapes with random weights. Each part writes its
own file below DIR when it ends and is not run again while that file is there. A part that was cut
off, by --minutes or otherwise, or in which a server failed, goes on where it was: what it has found
so far is in DIR/PART.rows.jsonl, logs of servers that failed, or were cut off, in DIR/logs. A GPU
of another kind, or options that change what is found, need another DIR. The exit status is 1 if any
part failed or has not ended. On a CPU (--device cpu) the same parts run small, without graphs, and
so they are tested.

Where there are minutes only: `--parts memory,costs --shapes llama-3.1-8b`, then `--parts identity
--policies allocate` by some of --setups (--list-setups says which there are), then `--parts traces
--files NAME --concurrency 1,32`. A second start on a machine is much faster than the first, for
which FlashInfer and SGLang compile kernels; these can be kept, in $SGLANG_CACHE_DIR and, SGLang's
own, $SGLANG_JIT_CACHE_DIR.

memory: the kernels that lay verify trees out and move accepted paths, under compute-sanitizer and
    beside torch; without the sanitizer where it cannot use the device. On a CPU there are no
    kernels to compare.
costs: what steps of the shapes cost, timed by the server before it serves: verifications of each
    width, of which that of one node is nearly a plain step, with the memory that each takes. The
    gap between steps is not among them.
identity: every policy's greedy output beside plain serving's on the demo pair, over attention
    backends, graphs, overlap scheduling, trees and chains, widths that change from step to
    step, and concurrency. Where a token differs, the gap is shown between the two log probabilities
    that plain serving gives there. In bfloat16 some logits tie: such a difference is reported with
    its gap, and still counts as a difference. A server that did not start is a problem of its row.
sampling: outcomes of sampled replies beside those of plain serving, by a chi-square test that has
    to tell another temperature apart; without --setups in one setup of each attention backend.
traces: benchmarks.trace_serving on the shapes, by groups of modes that fit into memory together;
    on a GPU all modes with FlashInfer, and without graphs of prefills.
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
    """launch: starts servers otherwise than as children of this process."""
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
        except ValueError as error:  # the other parts run all the same
            print(f"{name}: {error}")
            passed = None
        has_failed |= not passed
    return int(has_failed)


def _run(name: str, part: PartFile, options: argparse.Namespace, deadline: float) -> bool | None:
    """Whether the part passed; None where it has not ended."""
    with _PARTS[name](options) as units:
        passed = part.passed(units)
        if passed is not None:
            outcome = "passed" if passed else f"FAILED; without {part.path} it runs again"
            print(f"{name}: done before, {outcome}")
            return passed
        began = time.monotonic()
        passed = part.run(units, deadline=deadline, show=_show)
    seconds = time.monotonic() - began
    if passed is None:
        print(f"{name}: not ended in {seconds:.0f} s; it goes on when this is called again")
    else:
        print(f"{name}: {'passed' if passed else 'FAILED'} in {seconds:.0f} s, {part.path}")
    return passed


# What changes the rows of a part that its units are not named by.
_SETTINGS = {
    "memory": (),
    "costs": ("widths",),
    "identity": ("prompts", "concurrency"),
    "sampling": ("samples",),
    "traces": ("files", "concurrency"),
}


def _settings(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """What decides what is found."""
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
    parser = parser_of("gpu_check", "What only a GPU shows.")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), metavar="DIR")
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        help=f"of {','.join(_PARTS)} (default: all that can run)",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--traces", type=Path, metavar="DIR")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE")
    parser.add_argument("--files", nargs="+", metavar="NAME", help="these recordings only")
    parser.add_argument("--prompts", type=count, default=36, help="of the identity part")
    parser.add_argument("--concurrency", type=counts, default=[1, 2, 8, 32])
    parser.add_argument(
        "--shapes",
        type=lambda text: text.split(","),
        default=["llama-3.1-8b", "qwen3-8b"],
        help=f"of {','.join(SHAPES)} (default: those of 8B models)",
    )
    parser.add_argument("--widths", type=counts, default=[2, 4, 8, 16, 32, 64])
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default=list(POLICIES),
        help="of the parts identity and sampling (default: all)",
    )
    parser.add_argument(
        "--samples", type=count, default=4000, help="of each prompt in the sampling part"
    )
    parser.add_argument(
        "--setups",
        type=lambda text: text.split(","),
        help="of the parts identity and sampling, by name or number (default: all)",
    )
    parser.add_argument(
        "--list-setups",
        action="store_true",
        help="print numbers, names and flags of those of the device, under policy allocate; "
        "without a GPU, of those of Hopper",
    )
    parser.add_argument(
        "--servers-at-once", type=count, help="of the traces part (default: as many as fit)"
    )
    parser.add_argument(
        "--minutes", type=not_negative, default=float("inf"), help="after which nothing new begins"
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
            parser.error(f"--{name}: {', '.join(unknown)}: known are {', '.join(known)}")
    if options.device == "cuda":
        check_gpu()
    if options.setups is not None:
        options.setups = [by_name[name] for name in dict.fromkeys(options.setups)]
    if options.servers_at_once is not None and options.servers_at_once < 2:
        parser.error("--servers-at-once: 2 or more, or nothing is compared")
    missing = {}
    if options.device == "cuda" and shutil.which(SANITIZER) is None:
        missing["memory"] = f"{SANITIZER}, of the CUDA toolkit, on the PATH"
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
