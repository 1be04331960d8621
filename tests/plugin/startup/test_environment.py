"""What is said of an environment, where the machine can be arranged for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hvd.cli import main
from sglang_hvd.plugin.startup.environment import is_writable, require_cpu_operators

ROOT = Path(__file__).parents[3]


def test_a_folder_that_can_be_made_is_writable(tmp_path: Path) -> None:
    assert is_writable(tmp_path / "new" / "newer")
    (tmp_path / "file").touch()
    assert not is_writable(tmp_path / "file")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_below_one_that_may_not_be_entered_is_not_writable(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    # The sources and packages are loaded before the child gives up root's rights.
    command = (
        "import os, sys; from pathlib import Path; "
        "from sglang_hvd.plugin.startup.environment import is_writable; "
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); "
        f"print(is_writable(Path({str(home)!r}) / '.cache' / 'sglang_hvd'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.parametrize("command", ["demo", "serve"])
def test_the_demo_needs_the_cpu_operators(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_cpu_operators()
    monkeypatch.setitem(sys.modules, "sgl_kernel_cpu", None)
    assert main([command]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "error: sglang-hvd demo and serve run on the CPU, by operators that no wheel has: run make "
        "demo in a clone of the project\n"
    )
