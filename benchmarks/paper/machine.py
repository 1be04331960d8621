"""Where a run is made, and with which versions."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sglang_hvd.paper.results import Machine

_PACKAGES = (
    *("sglang-hvd", "sglang", "torch", "transformers", "datasets"),
    *("flashinfer-python", "sglang-kernel"),
)


def this_machine(*, has_gpu: bool) -> Machine:
    """has_gpu: servers run on the GPU."""
    gpus = _lines(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", *_visible()])
    gpus = gpus if has_gpu else []
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        gpu=gpus[0] if gpus else None,
        num_gpus=len(gpus),
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gb=round(memory / 1e9, 1),
    )


def versions(*, has_gpu: bool) -> dict[str, str]:
    """Versions by package, of Python, of the driver and of this project's commit."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    here = Path(__file__).parent
    if commit := _lines(["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]):
        found["commit"] = commit[0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", *_visible()]
    if has_gpu and (driver := _lines(query)):
        found["driver"] = driver[0]
    return found


def _visible() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ["-i", visible] if visible else []


def _cpu() -> str:
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in told.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def _lines(command: Sequence[str]) -> list[str]:
    """What a program prints; nothing if it is not there or fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return []
    return ran.stdout.split("\n")[:-1] if ran.returncode == 0 else []
