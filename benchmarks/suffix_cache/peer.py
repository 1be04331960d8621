"""ArcticInference's suffix cache, built on demand: nothing of it is kept in this repository."""

import importlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

VERSION = "0.3.0"


class PeerUnavailableError(Exception):
    """Why the peer cannot be built here."""


def load(folder: Path) -> ModuleType:
    """The module arctic_inference.suffix_decoding, built in the folder unless it is there.

    Needs pip with a package index, CMake, a C++ compiler and nanobind, but neither torch nor vLLM.
    Raises PeerUnavailableError with the reason.
    """
    package = folder / "arctic_inference" / "suffix_decoding"
    if not list(package.glob("_C.*.so")):
        _build(folder, package)
    sys.path.insert(0, str(folder))
    return importlib.import_module("arctic_inference.suffix_decoding")


def _build(folder: Path, package: Path) -> None:
    if shutil.which("cmake") is None:
        raise PeerUnavailableError("there is no cmake")
    folder.mkdir(parents=True, exist_ok=True)
    requirement = f"arctic-inference=={VERSION}"
    # Without isolation pip does not fetch its build requirements, torch among them.
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-binary", ":all:", "--no-build-isolation", requirement),
        *("--dest", str(folder)),
    )
    [sdist] = folder.glob("arctic_inference-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    build = folder / "build"
    _run(
        *("cmake", "-S", str(source / "csrc" / "suffix_decoding"), "-B", str(build)),
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_BUILD_TYPE=Release",
    )
    _run("cmake", "--build", str(build))
    # Its own __init__.py would import vLLM.
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    for file in (source / "arctic_inference" / "suffix_decoding").glob("*.py"):
        if file.name != "simulator.py":
            shutil.copy(file, package)
    [library] = build.glob("_C.*.so")
    shutil.copy(library, package)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip() or error.stdout.strip()).splitlines()[-1:]
        raise PeerUnavailableError(f"{' '.join(command[:4])} failed: {last_line}") from None
