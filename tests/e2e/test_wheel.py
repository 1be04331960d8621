"""A wheel installs next to SGLang without a compiler, serves with HVD, and can be uninstalled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path
from typing import BinaryIO

import pytest

import sglang_hvd
from sglang_hvd.demo.models import DemoModels
from sglang_hvd.demo.modes import MODEL_TREE_FLAGS
from sglang_hvd.demo.server import CPU_FLAGS, Process, SglangServer, demo_environment, spawn
from tests.e2e.conftest import HANGS_AFTER_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def run(*command: str | Path, **settings: object) -> str:
    """Run a command, and return what it printed. It must succeed."""
    done = subprocess.run(
        [*map(str, command)], text=True, capture_output=True, check=False, **settings
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of these sources."""
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with what this one has, but without the project."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    of_tests, fresh = (
        Path(sysconfig.get_path("purelib", vars={"base": str(base)}))
        for base in (sys.prefix, folder)
    )
    for package in of_tests.iterdir():
        text = package.read_text() if package.suffix == ".pth" else package.name
        if "sglang_hvd" not in text and text.strip() != str(ROOT):
            (fresh / package.name).symlink_to(package)
    return folder


def test_the_wheel_is_for_this_python_and_any_recent_linux(wheel: Path) -> None:
    name, version, *tags = wheel.stem.split("-")
    assert (name, version) == ("sglang_hvd", sglang_hvd.__version__)
    minor = sys.version_info.minor
    expected = ["cp311", "cp311"] if minor == 11 else ["cp312", "abi3"]
    assert tags[:2] == expected
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
    # No library but those of every Linux: else auditwheel has no tag that is more than "linux".
    assert 'platform tag: "manylinux_2_' in " ".join(shown.split())


def test_the_wheel_has_all_that_the_package_needs_and_no_cpp_sources(wheel: Path) -> None:
    tracked = run("git", "ls-files", "sglang_hvd", cwd=ROOT).split()
    wanted = {path for path in tracked if "/native/" not in path}
    with zipfile.ZipFile(wheel) as content:
        packed = {name for name in content.namelist() if name.startswith("sglang_hvd/")}
        (metadata,) = (name for name in content.namelist() if name.endswith("/METADATA"))
        about = Parser().parsestr(content.read(metadata).decode())
        # The notices of what is linked into the native module.
        for file in ("LICENSE", "licenses/nanobind.txt", "licenses/robin-map.txt"):
            assert content.read(f"{Path(metadata).parent}/licenses/{file}") == (
                (ROOT / file).read_bytes()
            )
    (native,) = (name for name in packed if name.endswith(".so"))
    assert packed - {native} == wanted
    assert native.startswith("sglang_hvd/_native.")
    assert about["Version"] == sglang_hvd.__version__
    assert 'sglang==0.5.23; extra == "cuda"' in about.get_all("Requires-Dist", [])


def test_a_wheel_serves_without_a_compiler_and_leaves_sglang_plain(
    wheel: Path, environment: Path, models: DemoModels, tmp_path: Path
) -> None:
    python, bin_dir = environment / "bin" / "python", environment / "bin"
    # Nothing of the machine and of this environment is found: no compiler, and no sources of the
    # project. SGLang asks lscpu for the cores.
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "lscpu").symlink_to(shutil.which("lscpu") or "lscpu")
    variables = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **demo_environment(),
        **{"PATH": f"{bin_dir}:{tools}", "XDG_CACHE_HOME": str(tmp_path)},
        "PYTHONSAFEPATH": "1",  # otherwise the sources in the working folder come before the wheel
    }
    assert not any(shutil.which(name, path=variables["PATH"]) for name in ("cc", "gcc", "clang"))
    at_environment = (*PIP, "--python", python)
    run(*at_environment, "install", "--no-deps", "--no-index", wheel, env=variables, cwd=tmp_path)
    assert run(bin_dir / "sglang-hvd", "--version", env=variables, cwd=tmp_path) == (
        f"sglang-hvd {sglang_hvd.__version__}\n"
    )
    hvd = _hvd_flags(models)
    flags = ("--model-path", str(models.target), *CPU_FLAGS)
    doctor = (bin_dir / "sglang-hvd", "doctor", *flags, *hvd, "--json")
    examined = json.loads(run(*doctor, env=variables, cwd=tmp_path))
    assert examined["would_serve"]
    texts = [found["text"] for found in examined["findings"]]
    assert any(f"installed in {environment}" in text for text in texts)

    body = {
        "text": "UPDATE users SET name = 'x' WHERE id = 1; UPDATE users SET name = 'x' WHERE id",
        "sampling_params": {"temperature": 0, "max_new_tokens": 48},
    }
    with _server(python, [*flags, *hvd], tmp_path / "hvd.log", variables) as server:
        with_hvd = server.post("/generate", body)
        (state,) = server.get("/server_info")["internal_states"]
        assert "HVD: policy allocate" in server.log
    assert state["hvd"]["config"]["policy"] == "allocate"
    assert with_hvd["meta_info"]["hvd"][0]["num_target_tokens"] > 0

    run(*at_environment, "uninstall", "--yes", "sglang-hvd", env=variables, cwd=tmp_path)
    assert not (bin_dir / "sglang-hvd").exists()
    assert not list(environment.rglob("*sglang_hvd*"))
    with _server(python, flags, tmp_path / "plain.log", variables) as server:
        plain = server.post("/generate", body)
        (state,) = server.get("/server_info")["internal_states"]
        assert "HVD:" not in server.log
    assert "hvd" not in state
    assert plain["output_ids"] == with_hvd["output_ids"]


def _hvd_flags(models: DemoModels) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", "HVD", *MODEL_TREE_FLAGS),
        *("--speculative-draft-model-path", str(models.drafter)),
        *("--hvd-predictor", str(models.predictor)),
    )


def _server(
    python: Path, flags: Sequence[str], log_file: Path, variables: dict[str, str]
) -> SglangServer:
    """A server that runs in another environment."""

    def launch(command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> Process:
        return spawn([str(python), *command[1:]], variables, log)

    return SglangServer(flags, log_file=log_file, timeout_s=HANGS_AFTER_S, grace_s=0, launch=launch)
