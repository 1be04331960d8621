"""Installs a server on a GPU machine that reaches no package registry.

    python scripts/offline_install.py pack DIR           where there is a registry
    python scripts/offline_install.py check DIR          on the GPU machine: what it has and lacks
    python scripts/offline_install.py install DIR        on the GPU machine

pack builds this project's wheel, downloads the wheels that serving needs, and cuts each file into
pieces of at most --piece-mb for small transfers. The Python that packs must have the version of the
GPU machine's. install joins the pieces, compares their checksums and installs without a registry.
It also copies the native modules into this folder's sources, which python finds first here.

SGLang 0.5.23 needs torch 2.14, which needs the CUDA 13 libraries. A machine that runs torch 2.11
for CUDA 13.0 has most of them, so they are left out; --with-cuda-libraries packs them too. The NCCL
of that machine is too old for torch 2.14, and is packed.

The packed files take 2.8 GB; pack lists the largest. --without leaves out packages that are already
there or not needed, such as cuDNN (527 MB), which serving a language model does not use. --drop
leaves out files of packages, such as FA3's sgl_kernel/flash_ops*. --gpu 9.0 leaves out other GPUs'
machine code and compresses the rest again: torch shrinks from 555 MB to 170, in six minutes on one
core. flashinfer compiles its kernels on first use with the machine's nvcc. check and install need
only the standard library, since a bare machine runs them.
"""

import argparse
import fnmatch
import hashlib
import importlib.util
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGES = ("sglang==0.5.23",)
MODULES = (
    *("torch", "sgl_kernel", "flashinfer", "triton", "transformers", "xgrammar", "sglang"),
    "sglang_hvd",
)
# Modules that a start imports later: native code for the machine's Python, which is searched next
# to the sources, and SGLang's modules of CUTLASS DSL and FlashMLA, which the rest of SGLang can do
# without.
_LATE_MODULES = (
    *("sglang_hvd.suffix_cache", "sglang_hvd.payoff", "sglang_hvd.allocation"),
    "sglang_hvd.plugin.trees.host_layout",
    "sglang.kernels.ops.gemm.cutedsl_dual_gemm",
    "sglang.srt.layers.attention.flashmla_backend",
)
_INDEX = "pieces.json"
_SOURCES = Path(__file__).parents[1]
# pip takes wheels of the platforms that it is told, and of no older ones.
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)
# Prefixes of wheel names: what torch 2.11 for CUDA 13.0 has already installed on a machine.
_CUDA_LIBRARIES = tuple(
    f"nvidia_{name}"
    for name in (
        *("cublas", "cuda_cupti", "cuda_nvrtc", "cuda_runtime", "cufft", "cufile", "curand"),
        *("cusolver", "cusparse", "cusparselt", "nvjitlink", "nvshmem", "nvtx"),
    )
)


# NVIDIA publishes no layout of fat binaries; this is what CUDA 13.0 writes. A fat binary: magic,
# version, bytes of this header, bytes of the entries. An entry: kind, version, bytes of this
# header, bytes of its code; its GPU stands at 28.
_FAT_BINARY, _FAT_MAGIC = struct.Struct("<IHHQ"), 0xBA55ED50
_FAT_ENTRY, _FAT_MACHINE_CODE = struct.Struct("<HHIQ"), 2


def pack(
    folder: Path,
    packages: list[str],
    piece_bytes: int,
    *,
    python: str,
    without: tuple[str, ...],
    drop: tuple[str, ...],
    gpu: int | None,
) -> None:
    """Downloads wheels and cuts them; pieces.json says which pieces make which file.

    without: beginnings of the names of wheels that are left out, with _ for -.
    drop, gpu: see shrink.
    """
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python != here:
        raise ValueError(f"this is Python {here}: pack with {python}, which our wheel must be of")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        wheels = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--dest", name, "--only-binary=:all:"]
        command += ["--python-version", python, "--implementation", "cp"]
        for platform in _PLATFORMS:
            command += ["--platform", platform]
        subprocess.run([*command, *packages], check=True)
        own = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", name]
        subprocess.run([*own, str(_SOURCES)], check=True)
        index = {}
        for wheel in sorted(wheels.iterdir()):
            if not wheel.name.lower().startswith(without):
                if drop or gpu is not None:
                    shrink(wheel, drop=drop, gpu=gpu)
                index[wheel.name] = cut(wheel, folder, piece_bytes)
            wheel.unlink()
    (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n")
    total = sum(entry["num_bytes"] for entry in index.values())
    num_pieces = sum(len(entry["pieces"]) for entry in index.values())
    print(f"{len(index)} files, {num_pieces} pieces, {total / 2**20:.0f} MiB in {folder}")
    for name in sorted(index, key=lambda name: -index[name]["num_bytes"])[:10]:
        print(f"{index[name]['num_bytes'] / 2**20:6.0f} MiB  {name}")


def shrink(wheel: Path, *, drop: tuple[str, ...], gpu: int | None) -> None:
    """Writes a wheel again, with the strongest compression that pip reads.

    drop: patterns of the names of files that are left out.
    gpu: ten times the compute capability whose machine code is kept; None keeps all.
    """
    smaller = wheel.with_suffix(".smaller")
    with (
        zipfile.ZipFile(wheel) as content,
        zipfile.ZipFile(smaller, "w", zipfile.ZIP_LZMA) as target,
    ):
        for info in content.infolist():
            if any(fnmatch.fnmatch(info.filename, pattern) for pattern in drop):
                continue
            data = bytearray(content.read(info))
            if gpu is not None and data.startswith(b"\x7fELF"):
                keep_code_of(data, gpu)
            info.compress_type = zipfile.ZIP_LZMA
            target.writestr(info, data)
    smaller.replace(wheel)


def keep_code_of(library: bytearray, gpu: int) -> None:
    """Zeros in place of what a shared library holds for other GPUs, wherever it has machine code
    for this one; a loader asks for nothing else then.

    gpu: ten times its compute capability.
    """
    for begin, end in _fat_sections(library):
        at = begin
        while at + _FAT_BINARY.size <= end:
            magic, _, num_header, num_bytes = _FAT_BINARY.unpack_from(library, at)
            if magic != _FAT_MAGIC:
                at += 8  # padding between two of them
                continue
            entry, at = at + num_header, at + num_header + num_bytes
            codes = []
            while entry < at:
                kind, _, num_header, num_bytes = _FAT_ENTRY.unpack_from(library, entry)
                (of_gpu,) = struct.unpack_from("<I", library, entry + 28)
                is_kept = (kind, of_gpu) == (_FAT_MACHINE_CODE, gpu)
                codes.append((is_kept, entry + num_header, num_bytes))
                entry += num_header + num_bytes
            if any(is_kept for is_kept, _, _ in codes):
                for is_kept, code, num_bytes in codes:
                    if not is_kept:
                        library[code : code + num_bytes] = bytes(num_bytes)


def _fat_sections(library: bytearray) -> list[tuple[int, int]]:
    """Where the fat binaries of a 64-bit ELF file are."""
    (table,) = struct.unpack_from("<Q", library, 40)
    size, count, names = struct.unpack_from("<HHH", library, 58)

    def section(number: int) -> tuple[int, int, int]:
        at = table + number * size
        (name,) = struct.unpack_from("<I", library, at)
        begin, num_bytes = struct.unpack_from("<QQ", library, at + 24)
        return name, begin, begin + num_bytes

    _, begin_names, _ = section(names)
    found = []
    for number in range(count):
        name, begin, end = section(number)
        if library.startswith(b".nv_fatbin\0", begin_names + name):
            found.append((begin, end))
    return found


def cut(file: Path, folder: Path, piece_bytes: int) -> dict[str, Any]:
    """Writes the pieces of a file; what join needs to know of them."""
    digest, pieces = hashlib.sha256(), []
    with file.open("rb") as source:
        while data := source.read(piece_bytes):
            digest.update(data)
            piece = folder / f"{file.name}.{len(pieces):03d}"
            piece.write_bytes(data)
            pieces.append(piece.name)
    return {
        "pieces": pieces,
        "sha256": digest.hexdigest(),
        "num_bytes": file.stat().st_size,
    }


def join(folder: Path, out: Path) -> list[Path]:
    """Makes the files of their pieces. Raises ValueError for a piece that is missing or damaged."""
    files = []
    for name, entry in json.loads((folder / _INDEX).read_text()).items():
        digest = hashlib.sha256()
        with (out / name).open("wb") as target:
            for piece in entry["pieces"]:
                if not (folder / piece).is_file():
                    raise ValueError(f"{folder / piece} is missing: copy it again")
                data = (folder / piece).read_bytes()
                digest.update(data)
                target.write(data)
        if digest.hexdigest() != entry["sha256"]:
            raise ValueError(f"{name}: a piece in {folder} is damaged: copy them again")
        files.append(out / name)
    return files


def install(folder: Path) -> None:
    """Joins and installs everything, without the dependencies that were left out."""
    with tempfile.TemporaryDirectory() as name:
        files = join(folder, Path(name))
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps"]
        subprocess.run([*command, "--no-compile", *map(str, files)], check=True)
        for file in files:
            if file.name.startswith("sglang_hvd-"):
                add_native(file, _SOURCES)


def add_native(wheel: Path, sources: Path) -> None:
    """Writes the native modules of the project's wheel to where its sources are looked for."""
    with zipfile.ZipFile(wheel) as content:
        for name in content.namelist():
            if "/_native" in name and name.endswith(".so"):
                content.extract(name, sources)


def check() -> int:
    """What is there to run a server with; 0 if nothing is missing."""
    missing = [module for module in MODULES if importlib.util.find_spec(module) is None]
    for module in MODULES:
        print(f"{module}: {'missing' if module in missing else 'there'}")
    for tool in ("nvidia-smi", "nvcc", "compute-sanitizer"):
        path = shutil.which(tool)
        print(f"{tool}: {path or 'missing'}")
        if path is None and tool == "nvcc":
            missing.append(tool)
    # A module may be there and not load: its libraries may be missing, or others.
    for module in (*MODULES, *_LATE_MODULES):
        if module.partition(".")[0] in missing:
            continue
        code = f"import {module}"
        if module == "torch":
            code += "; print('torch', torch.__version__, 'CUDA', torch.cuda.is_available())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode:
            missing.append(module)
            print(f"import {module}: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
        elif module == "torch":
            print(done.stdout.strip())
    return int(bool(missing))


def main() -> int:
    parser = argparse.ArgumentParser(description="Install on a machine without a registry.")
    parser.add_argument("step", choices=["pack", "check", "install"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES))
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, help="of the GPU machine (default: %(default)s)")
    parser.add_argument("--piece-mb", type=int, default=60)
    parser.add_argument("--with-cuda-libraries", action="store_true")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="NAME", help="packages that are there already"
    )
    parser.add_argument(
        "--drop", nargs="+", default=[], metavar="PATTERN", help="files of packages to leave out"
    )
    parser.add_argument(
        "--gpu", metavar="X.Y", help="compute capability of the only GPU to pack for"
    )
    options = parser.parse_args()
    if options.step == "check":
        return check()
    try:
        if options.step == "pack":
            piece_bytes = options.piece_mb * 10**6
            without = tuple(name.lower().replace("-", "_") + "-" for name in options.without)
            if not options.with_cuda_libraries:
                without += _CUDA_LIBRARIES
            pack(
                options.folder,
                options.packages,
                piece_bytes,
                python=options.python,
                without=without,
                drop=tuple(options.drop),
                gpu=None if options.gpu is None else round(10 * float(options.gpu)),
            )
        else:
            install(options.folder)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
