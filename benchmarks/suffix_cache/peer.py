"""Builds ArcticInference's suffix cache on demand: no code of it is kept in this repository."""

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

VERSION = "0.3.0"
# nanobind is the version that it pins; setuptools and wheel only read its metadata.
_BUILD_TOOLS = ("cmake>=3.18,<4", "nanobind==2.9.2", "setuptools", "wheel")


class PeerUnavailableError(Exception):
    """The peer cannot be built here; the message says why."""


def load(folder: Path) -> ModuleType:
    """The module arctic_inference.suffix_decoding, built in the folder if it is not there yet.

    Needs pip with a package index and a C++ compiler, but neither torch nor vLLM.
    Raises PeerUnavailableError with the reason.
    """
    package = folder / "arctic_inference" / "suffix_decoding"
    if not list(package.glob("_C.*.so")):
        _build(folder, package)
    sys.path.insert(0, str(folder))
    return importlib.import_module("arctic_inference.suffix_decoding")


def load_ngram() -> ModuleType:
    """SGLang's module with its NGRAM corpus, which SGLang compiles at first use.

    Raises PeerUnavailableError with the reason.
    """
    try:
        module = importlib.import_module("sglang.srt.speculative.cpp_ngram.ngram_corpus")
        module.NgramCorpus(capacity=1_000)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1:]
        raise PeerUnavailableError(f"{type(error).__name__}: {reason}") from None
    return module


def _build(folder: Path, package: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tools = folder / "tools"
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    _run(*pip, "install", "--upgrade", "--target", str(tools), *_BUILD_TOOLS)
    # With isolation pip would fetch its build requirements, torch among them.
    _run(
        *(*pip, "download", "--dest", str(folder), "--no-deps", "--no-binary", ":all:"),
        *("--no-build-isolation", f"arctic-inference=={VERSION}"),
        tools=tools,
    )
    [sdist] = folder.glob("arctic_inference-*.tar.gz")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:  # Python before 3.11.4, Debian 12's among them
            archive.extractall(folder)
    source = folder / sdist.name.removesuffix(".tar.gz")
    build = folder / "build"
    cmake = (sys.executable, "-m", "cmake")
    _run(
        *(*cmake, "-S", str(source / "csrc" / "suffix_decoding"), "-B", str(build)),
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_BUILD_TYPE=Release",
        tools=tools,
    )
    _run(*cmake, "--build", str(build), tools=tools)
    # Its own __init__.py would import vLLM.
    package.mkdir(parents=True, exist_ok=True)
    (package.parent / "__init__.py").touch()
    for file in (source / "arctic_inference" / "suffix_decoding").glob("*.py"):
        if file.name != "simulator.py":
            shutil.copy(file, package)
    [library] = build.glob("_C.*.so")
    shutil.copy(library, package)


def _run(*command: str, tools: Path | None = None) -> None:
    """tools: folder of Python packages that the command imports before all others."""
    environ = os.environ if tools is None else {**os.environ, "PYTHONPATH": str(tools)}
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip() or error.stdout.strip()).splitlines()[-1:]
        raise PeerUnavailableError(f"{' '.join(command[:4])} failed: {last_line}") from None
