"""What this environment offers to a server that is asked for HVD, before any flag is read.

Nothing here imports SGLang or torch at the top: what cannot be imported is a finding.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Literal, get_args
from warnings import catch_warnings, simplefilter

import sglang_hvd
from sglang_hvd.plugin.startup.supported import (
    SUPPORTED_SGLANG,
    require_hooks,
    require_supported_sglang,
)
from sglang_hvd.user_cache import costs_folder

Status = Literal["ok", "note", "fault"]
Section = Literal["environment", "models", "launch", "files"]
SECTIONS: tuple[Section, ...] = get_args(Section)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of what was found.

    section, topic: what it is about.
    text: what was found, in one line. That of a fault also says what to do.
    status: note: worth knowing; fault: a server would not start.
    """

    section: Section
    topic: str
    text: str
    status: Status = "ok"


def examine_environment() -> Iterator[Finding]:
    """Imports SGLang and loads its plugins, unless a fault is found before that."""
    yield Finding("environment", "sglang-hvd", f"{sglang_hvd.__version__}, {_how_installed()}")
    yield Finding("environment", "Python", f"{platform.python_version()}, {sys.executable}")
    try:
        require_supported_sglang()
    except RuntimeError as error:
        yield _fault("SGLang", str(error))
        return
    yield Finding("environment", "SGLang", f"{SUPPORTED_SGLANG}, the supported version")
    hooks = _hooks()
    yield hooks
    if hooks.status == "fault":
        return
    device = _device()
    yield device
    yield _compiler(is_gpu=device.text.startswith("GPU"))
    try:
        require_cpu_operators()
    except ValueError as error:
        yield Finding("environment", "demo", str(error), "note")
    yield _kept_costs()


def require_cpu_operators() -> None:
    """Raises ValueError where the CPU operators are not installed that the demo's servers need."""
    if find_spec("sgl_kernel_cpu") is None:
        raise ValueError(
            "sglang-hvd demo and serve run on the CPU, by operators that no wheel has: run make "
            "demo in a clone of the project"
        )


@contextmanager
def quiet() -> Iterator[list[logging.LogRecord]]:
    """Keeps what SGLang logs, prints and warns of from the terminal. Yields the warnings and errors
    of this project, and those of loading plugins."""
    root, records = logging.getLogger(), _Records(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("sglang_hvd", "sglang.srt.plugins")]
    handlers, level = root.handlers[:], root.level
    root.handlers = [logging.NullHandler()]
    for logger in loggers:
        logger.addHandler(records)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), catch_warnings():
            simplefilter("ignore")
            yield records.kept
    finally:
        for logger in loggers:
            logger.removeHandler(records)
        root.handlers, root.level = handlers, level


class _Records(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


def is_writable(folder: Path) -> bool:
    """Whether files can be written into the folder, or the folder can be made."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError:  # a folder on the way may not be entered
        return False
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _fault(topic: str, text: str) -> Finding:
    return Finding("environment", topic, text, "fault")


def _how_installed() -> str:
    folder = Path(sglang_hvd.__file__).parent
    try:
        is_listed = distribution("sglang-hvd").locate_file("sglang_hvd") == folder
    except PackageNotFoundError:
        is_listed = False
    return f"{'installed' if is_listed else 'its sources'} in {folder}"


def _hooks() -> Finding:
    records: list[logging.LogRecord] = []
    try:
        with quiet() as records:
            num_hooks = require_hooks()
    except (ImportError, AttributeError, RuntimeError, SystemExit) as error:
        # The plugins' own errors tell more than the missing hooks do.
        causes = [record.exc_info[1] for record in records if record.exc_info] or [error]
        text = "; ".join(" ".join(str(cause).split()) for cause in causes)
        if any(isinstance(cause, ModuleNotFoundError) for cause in causes):
            text += (
                f": pip install 'sglang=={SUPPORTED_SGLANG}' installs what SGLang needs on a GPU, "
                "and make demo in a clone of the project what it needs on a CPU"
            )
        return _fault("hooks", text)
    return Finding("environment", "hooks", f"all {num_hooks} places in SGLang are hooked")


def _device() -> Finding:
    """The device that SGLang takes unless --device names another."""
    with quiet():
        import torch
        from sglang.srt.utils.common import get_device

        version = f"torch {torch.__version__}"
        if torch.cuda.is_available():
            gpus = [
                torch.cuda.get_device_properties(index)
                for index in range(torch.cuda.device_count())
            ]
            names = ", ".join(
                f"{gpu.name} with {gpu.total_memory / 2**30:.0f} GiB (compute capability "
                f"{gpu.major}.{gpu.minor})"
                for gpu in gpus
            )
            return Finding("environment", "device", f"GPU: {names}; {version}")
        try:
            device = get_device()
        except RuntimeError:
            return _fault(
                "device",
                f"{version} finds no GPU, and SGLang's packages serve on one: to see HVD on a CPU, "
                "clone the project and run make demo there",
            )
    if device == "cpu" and find_spec("sgl_kernel") is None:
        return _fault(
            "device",
            f"CPU, but SGLang's CPU operators (sgl_kernel) are not installed; {version}: clone the "
            "project and run make demo, which installs them from patches/",
        )
    return Finding("environment", "device", f"{device}, {os.cpu_count()} cores; {version}")


def _compiler(*, is_gpu: bool) -> Finding:
    if not is_gpu:
        text = "none is needed; only building this project from its sources takes one"
        return Finding("environment", "compiler", text)
    named = os.environ.get("CC")
    found = next(filter(None, map(shutil.which, [named] if named else ["gcc", "clang"])), None)
    if found is None:
        text = f"Triton needs a C compiler on a GPU, and {named or 'none'} is found"
        return _fault("compiler", f"{text}: install gcc, or name one with CC=...")
    return Finding("environment", "compiler", f"Triton compiles with {found} on a GPU")


def _kept_costs() -> Finding:
    folder, topic = costs_folder(), "cost tables"
    if folder is None or not is_writable(folder):
        where = "this user has no home" if folder is None else f"{folder} cannot be written"
        text = f"{where}, so every start times the steps again: set XDG_CACHE_HOME"
        return Finding("files", topic, text, "note")
    return Finding("files", topic, f"kept in {folder}")
