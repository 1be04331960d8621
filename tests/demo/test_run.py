"""Servers of `sglang-hvd serve`."""

from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.demo import run
from sglang_hvd.demo.models import DemoModels
from sglang_hvd.demo.server import held_port


def test_servers_on_two_ports_have_a_log_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = []

    def refuse(flags: object, *, log_file: Path, **settings: Any) -> None:
        logs.append(log_file)
        raise ValueError("enough")

    models = DemoModels(*[tmp_path] * 3)
    monkeypatch.setattr(run, "ensure_demo_models", lambda cache_dir: models)
    monkeypatch.setattr(run, "SglangServer", refuse)
    for _ in range(2):
        with held_port() as held:
            port = held.getsockname()[1]
        with pytest.raises(ValueError, match="enough"):
            run.run_serve(cache_dir=tmp_path, port=port, more_flags=[])
        assert f"log in {logs[-1]}" in capsys.readouterr().out
        assert str(port) in logs[-1].name
