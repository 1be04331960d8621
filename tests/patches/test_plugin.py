"""The plugin acts on a CPU only, and ends the process rather than serve with half its hooks."""

import pytest
import torch
from sgl_kernel_cpu import hooks, plugin
from sglang.srt import utils
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs


def test_plugin_does_nothing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hooks, "install", lambda: pytest.fail("installed hooks"))
    plugin.register()


def test_missing_cpu_switch_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "is_cpu", lambda: False)
    with pytest.raises(SystemExit, match=r"^sgl_kernel_cpu: .*SGLANG_USE_CPU_ENGINE=1.*$"):
        plugin.register()


def test_other_sglang_version_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda _: "0.6.0")
    with pytest.raises(SystemExit, match=r"made for SGLang 0\.5\.23, found 0\.6\.0"):
        plugin.register()


def test_real_kernels_beside_ours_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda _: plugin.SGLANG_VERSION)
    with pytest.raises(SystemExit, match="sgl-kernel is installed too"):
        plugin.register()


def test_missing_hook_target_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "TARGETS", {"sglang.srt.speculative.eagle_utils.gone": None})
    with pytest.raises(SystemExit, match=r"SGLang 0\.5\.23 is not as expected .*gone"):
        plugin.register()


def test_operator_that_sglang_has_itself_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks.renorm, "top_k_renorm_prob", len)
    with pytest.raises(SystemExit, match="top_k_renorm_prob has an implementation of its own"):
        plugin.register()


def test_hook_that_was_not_applied_stops_before_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = set(hooks.TARGETS)
    lost = applied.pop()
    monkeypatch.setattr(HookRegistry, "_patched", applied)
    with pytest.raises(SystemExit, match=f"did not apply.*{lost}"):
        plugin.check_arguments(ServerArgs(model_path="none"), lambda _: None)


def test_rejection_sampling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HookRegistry, "_patched", set(hooks.TARGETS))
    server_args = ServerArgs(model_path="none", speculative_use_rejection_sampling=True)
    with pytest.raises(ValueError, match="--speculative-use-rejection-sampling needs a GPU"):
        plugin.check_arguments(server_args, lambda _: None)
