"""What a server's own process leaves to the machine: the port that it will listen on."""

import asyncio
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest
import uvloop

from sglang_hvd.demo.server import ServerFailed, SglangServer, held_port


def test_a_server_listens_on_a_held_port() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(5))
        writer.close()

    async def serve_and_ask(port: int) -> bytes:
        async with await asyncio.start_server(echo, "127.0.0.1", port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"hello")
            answer = await reader.read()
            writer.close()
            return answer

    with held_port() as holder:
        assert uvloop.run(serve_and_ask(holder.getsockname()[1])) == b"hello"


def test_a_held_port_is_nobody_elses() -> None:
    with (
        held_port() as holder,
        socket.socket() as other,
        pytest.raises(OSError, match="already in use"),
    ):
        other.bind(holder.getsockname())


@pytest.mark.parametrize(
    ("flags", "host"),
    [([], "127.0.0.1"), (["--host", "0.0.0.0"], "127.0.0.1"), (["--host=10.0.0.1"], "10.0.0.1")],
)
def test_a_server_is_asked_where_it_listens(flags: list[str], host: str) -> None:
    server = SglangServer(flags, log_file=Path("none.log"))
    assert server.url.startswith(f"http://{host}:")
    server.stop()


def test_a_server_that_begins_is_started_once_and_stopped_for_good(tmp_path: Path) -> None:
    started = []

    def launch(
        command: Sequence[str], environment: dict[str, str], log: BinaryIO
    ) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        return started[-1]

    server = SglangServer([], log_file=tmp_path / "log", launch=launch)
    server.stop()  # of one that never began
    server.begin()
    with pytest.raises(AssertionError, match="started before"):
        server.begin()
    server.stop()
    server.stop()
    assert [process.poll() for process in started] == [-signal.SIGTERM]


def test_a_server_that_dies_while_it_starts_is_told_of_and_let_go(tmp_path: Path) -> None:
    def launch(
        command: Sequence[str], environment: dict[str, str], log: BinaryIO
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["false"], start_new_session=True)

    server = SglangServer([], log_file=tmp_path / "log", launch=launch)
    server.begin()
    with pytest.raises(ServerFailed, match="code 1"):
        server.__enter__()
    server.stop()


@pytest.mark.parametrize(
    "begins", ["error: ", "launch_server.py: error: ", "sglang serve: error: "]
)
def test_a_server_that_says_in_a_line_what_it_refuses_is_quoted_without_the_rest(
    begins: str, tmp_path: Path
) -> None:
    def launch(
        command: Sequence[str], environment: dict[str, str], log: BinaryIO
    ) -> subprocess.Popen[bytes]:
        script = ["-c", f"echo much before; echo '{begins}no such policy'; exit 2"]
        return subprocess.Popen(["sh", *script], stdout=log, start_new_session=True)

    with pytest.raises(ServerFailed) as failed:
        SglangServer([], log_file=tmp_path / "log", launch=launch).__enter__()
    assert str(failed.value) == "no such policy"


def test_a_given_port_that_is_taken_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ValueError, match="cannot be used"),
    ):
        SglangServer([], log_file=Path("none.log"), port=other.getsockname()[1])
