"""A server that was asked for HVD runs all of it or does not start."""

from __future__ import annotations

import json
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
        "import sys; sys.modules['sglang_hvd._native'] = None; "
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


# Starts a launcher in this process, and says whether a module that hooks need was imported.
LAUNCH = """
import runpy, sys
sys.argv[0] = "launch_server.py"
try:
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
finally:
    print("sglang.srt.managers.scheduler" in sys.modules)
"""
DRAFTS = ["--speculative-algorithm", "HVD", "--speculative-draft-model-path", "nowhere"]
TREE = [
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "4"),
    *("--speculative-num-draft-tokens", "16"),
]


def test_wrong_flags_end_a_launcher_before_the_hooks_load() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, "--model-path", "nowhere", *DRAFTS, *TREE[:2]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "False"
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: --speculative-num-steps 3 describes a part of the model drafter")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (["sglang", "serve", "--hvd-policy", "cache"], ["--hvd-policy", "cache"]),
        (["/bin/sglang", "serve", "a/b", "--tp", "2"], ["--model-path", "a/b", "--tp", "2"]),
        (["sglang", "serve", "a/b", "--model-type", "llm"], None),
        (["sglang", "generate", "a/b"], None),
        (["sglang"], None),
        (["engine.py", "--hvd-policy", "cache"], None),
    ],
)
def test_a_launcher_is_known_by_its_command(
    command: list[str], flags: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", command)
    assert entry._launch_flags() == flags


# What the flags alone tell, without any model.
WRONG_FLAGS = {
    "--hvd-policy cache": "--hvd-policy given without --speculative-algorithm HVD",
    " ".join([*DRAFTS[:2], *TREE]): "HVD needs an EAGLE3 drafter for this model",
    " ".join([*DRAFTS, *TREE, "--hvd-policy greedy"]): "--hvd-policy: input should be",
    " ".join([*DRAFTS, *TREE, "--hvd-verify-width 8"]): "narrower than the model drafter's tree",
    " ".join([*DRAFTS, *TREE, "--hvd-config nowhere.yaml"]): "nowhere.yaml",
    " ".join([*DRAFTS, *TREE, "--hvd-predictor nowhere"]): "nowhere",
    " ".join([*DRAFTS, *TREE, "--enable-mixed-chunk"]): "does not support --enable-mixed-chunk",
    " ".join([*DRAFTS, "--speculative-num-draft-tokens 8"]): "describes a part of the model",
    " ".join([*DRAFTS, *TREE, "--hvd-nonsense 3"]): "unrecognized arguments: --hvd-nonsense 3",
}
# The hooks are not in place in this process, as at the start of a launcher.
CHECK_EACH = """
import contextlib, io, json, sys
from sglang_hvd.plugin.hooks.server_args import check_command_line
for flags in json.loads(sys.argv[1]):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            check_command_line(["--model-path", "nowhere", *flags.split()])
            said = "nothing"
        except SystemExit as end:
            said = str(end) if isinstance(end.code, str) else errors.getvalue().splitlines()[-1]
    print(json.dumps(said))
"""


def test_what_the_flags_alone_tell_ends_in_one_line() -> None:
    served = ["--speculative-algorithm EAGLE3 --nonsense", "--served-model-name hvd"]
    done = subprocess.run(
        [sys.executable, "-c", CHECK_EACH, json.dumps([*WRONG_FLAGS, *served])],
        capture_output=True,
        text=True,
        check=True,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    for flags, found in zip([*WRONG_FLAGS, *served], said, strict=True):
        assert WRONG_FLAGS.get(flags, "nothing") in found
        assert "\n" not in found
