"""A server that was asked for HVD runs all of it or does not start."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_hvd.plugin import entry
from sglang_hvd.plugin.hooks import server_args
from sglang_hvd.plugin.hooks.hook_table import HOOKS
from sglang_hvd.plugin.startup import supported


@pytest.fixture(autouse=True)
def loaded_plugins() -> None:
    load_plugins()


@pytest.fixture(params=[["--speculative-algorithm", "HVD"], ["--speculative-algorithm=hvd"]])
def asks_for_hvd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launch_server", *request.param])


def test_all_hooks_are_in_place() -> None:
    supported.require_hooks()


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "version", lambda _: "0.6.0")
    with pytest.raises(RuntimeError, match=r"supports SGLang 0\.5\.23, got 0\.6\.0"):
        supported.require_hooks()


@pytest.mark.usefixtures("asks_for_hvd")
def test_a_command_line_for_hvd_ends_on_another_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "version", lambda _: "0.6.0")
    with pytest.raises(SystemExit, match=r"^error: .*got 0\.6\.0: pip install [^\n]*$"):
        entry.register()


@pytest.mark.usefixtures("asks_for_hvd")
def test_a_command_line_for_hvd_ends_when_our_code_cannot_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sglang_hvd.plugin.hooks.hook_table", None)
    with pytest.raises(SystemExit, match=r"^error: the HVD plugin cannot load: [^\n]*$"):
        entry.register()


def test_sources_that_were_not_built_are_told_apart() -> None:
    register = (
        "import sys; sys.modules['sglang_hvd.allocation._native'] = None; "
        "from sglang_hvd.plugin import entry; entry.register()"
    )
    done = subprocess.run(
        [sys.executable, "-c", register, "--speculative-algorithm", "HVD"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("--editable, or start outside its sources")


def test_servers_without_hvd_do_not_depend_on_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launch_server", "--speculative-algorithm", "EAGLE3"])
    monkeypatch.setattr(supported, "version", lambda _: "0.6.0")
    with pytest.raises(RuntimeError, match=r"0\.6\.0"):  # which SGLang logs
        entry.register()


@pytest.mark.parametrize("lost", HOOKS)
def test_a_hook_that_did_not_apply_is_named(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HookRegistry, "_patched", set(HOOKS) - {lost})
    with pytest.raises(RuntimeError, match=lost):
        supported.require_hooks()
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{lost}"):
        server_args.resolve_hvd_alias(lambda name: name, "HVD")
    assert server_args.resolve_hvd_alias(lambda name: name, "EAGLE3") == "EAGLE3"
