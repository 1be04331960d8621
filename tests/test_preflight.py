"""What a machine lacks is said in one line each, before anything is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "preflight.sh"


def preflight(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPT],
        cwd=folder,
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def add_command(folder: Path, name: str, script: str) -> Path:
    command = folder / name
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return command


def test_a_machine_that_has_everything_names_its_python(tmp_path: Path) -> None:
    result = preflight(tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{sys.executable}\n", "")


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"CXX": "no-such-compiler"}, "no C++ compiler (no-such-compiler is not found)"),
        ({"CXX": "false"}, "false does not compile C++20"),
        ({"PYTHON": "/no/such/python"}, "no Python 3.11 or newer (/no/such/python is none)"),
        ({"PYTHON": "false"}, "no Python 3.11 or newer (false is none)"),
    ],
)
def test_what_is_missing_is_one_line(
    tmp_path: Path, environment: dict[str, str], line: str
) -> None:
    result = preflight(tmp_path, **environment)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"preflight: {line}")
    assert result.stderr.count("\n") == 1


def test_two_missing_things_are_two_lines(tmp_path: Path) -> None:
    result = preflight(tmp_path, CXX="no-such-compiler", PYTHON="false")
    assert result.stderr.count("\n") == 2


@pytest.mark.parametrize(
    ("missing", "line"),
    [("import venv", "cannot make virtual environments"), ("sysconfig", "has no C headers")],
)
def test_a_python_without_venv_or_headers_is_refused(
    tmp_path: Path, missing: str, line: str
) -> None:
    python = add_command(
        tmp_path, "python", f'case "$2" in *"{missing}"*) exit 1;; esac\nexec {sys.executable} "$@"'
    )
    result = preflight(tmp_path, PYTHON=str(python))
    assert result.returncode == 1
    assert f"{python} {line}" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_full_disk_is_refused_until_sglang_is_installed(tmp_path: Path) -> None:
    add_command(tmp_path, "df", "echo header; echo dev 9 9 5242880 9% /")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert "5 GB of disk are free" in preflight(tmp_path, PATH=path).stderr

    installed = tmp_path / ".venv" / "bin"
    installed.mkdir(parents=True)
    (installed / "sglang").touch()
    assert preflight(tmp_path, PATH=path).returncode == 0
