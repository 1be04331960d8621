"""What `sglang-hvd demo` refuses, and the servers of `sglang-hvd serve`."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from sglang_hvd.cli import main
from sglang_hvd.demo import run
from sglang_hvd.demo.server import ServerFailed, held_port
from sglang_hvd.demo.server_forker import ServerForker


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


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ServerForker", lambda environment: pytest.fail("a server starts"))


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--modes", "plain,fast"], "unknown mode 'fast': choose from plain, eagle3, ngram,"),
        (["--modes", ""], "unknown mode '': choose from"),
        (["--workloads", "chat,poems"], "unknown workload 'poems': choose from editing,"),
        (["--html", "/no/such/page.html"], "there is no folder /no/such"),
        (["--json", "/no/such/rows.json"], "there is no folder /no/such"),
        (["--svg", "/dev"], "/dev is a folder"),
        (["--sessions", "0"], "a whole number from 1 on, got 0"),
        (["--modes", "plain,eagle3", "--html", "page.html"], "add allocate to --modes"),
    ],
)
def test_what_cannot_be_is_one_line_before_any_server_starts(
    flags: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: object = main(["demo", *flags])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert told in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_all_modes_and_workloads_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(run, "run_demo", lambda **options: asked.append(options) or 0)
    assert main(["demo", "--modes", "all", "--workloads", "all"]) == 0
    assert main(["demo", "--modes", "allocate", "--workloads", "chat,editing"]) == 0
    assert main(["demo"]) == 0
    assert [(len(options["modes"]), len(options["families"])) for options in asked] == [
        (9, 6),
        (2, 2),
        (3, 3),
    ]
    assert asked[1]["modes"] == ["plain", "allocate"], "plain always plays"


def test_a_server_that_cannot_be_imported_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('this one is broken')")
    with (
        ServerForker({"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}) as forker,
        (tmp_path / "log").open("wb") as log,
        pytest.raises(ServerFailed, match=r"^the server ended with code 1: .*this one is broken"),
    ):
        forker.launch(["python", "-m", "sglang.launch_server"], {}, log)
