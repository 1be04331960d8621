"""Servers of `sglang-hvd serve`."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from sglang_hvd.demo import run
from sglang_hvd.demo.server import ServerFailed, held_port


def test_servers_on_two_ports_have_a_log_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = []

    def refuse(flags: object, *, log_file: Path, **settings: Any) -> None:
        logs.append(log_file)
        raise ValueError("enough")

    monkeypatch.setattr(run, "SglangServer", refuse)
    for _ in range(2):
        with held_port() as held:
            port = held.getsockname()[1]
        with pytest.raises(ValueError, match="enough"):
            run.run_serve(cache_dir=tmp_path, port=port, more_flags=[])
        assert f"log in {logs[-1]}" in capsys.readouterr().out
        assert str(port) in logs[-1].name


@pytest.mark.parametrize(
    ("code", "told"),
    [(-9, "the server was ended by SIGKILL"), (3, "the server ended with code 3")],
)
def test_a_server_that_fails_while_it_serves_is_told_of_with_its_log(
    code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = MagicMock(url="http://127.0.0.1:1")
    server.__enter__.return_value = server
    server.wait.return_value = code
    monkeypatch.setattr(run, "SglangServer", lambda *args, **settings: server)
    with held_port() as held:
        port = held.getsockname()[1]
    with pytest.raises(ServerFailed, match=rf"^{told}: its log is .*serve-{port}\.log$"):
        run.run_serve(cache_dir=tmp_path, port=port, more_flags=[])
