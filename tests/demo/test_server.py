"""What a server's own process leaves to the machine: the port that it will listen on."""

import asyncio
import socket

import pytest
import uvloop

from sglang_hvd.demo.server import held_port


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
