"""How the HTTP server ends: what clients read is written to its end, what nobody reads is cut."""

from __future__ import annotations

import asyncio
import logging
import socket
from argparse import Namespace
from contextlib import suppress

import pytest

from hardpoint.config.flags import FRONT_END_FLAGS
from hardpoint.processes import http_server
from hardpoint.processes.http_server import HttpServer

REQUEST = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope, receive, send) -> None:
    """/<n>: ends after n tenths of a second. /big: more than a client that does not read has room for."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/big":
        await send({"type": "http.response.body", "body": b"y" * (64 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b"y", "more_body": True})
    else:
        await send({"type": "http.response.body", "body": b"the beginning", "more_body": True})
        await asyncio.sleep(int(scope["path"][1:]) / 10)
    await send({"type": "http.response.body", "body": b"the end"})


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(http_server, "_FLUSH_TURN_S", 0.05)
    monkeypatch.setattr(http_server, "_IDLE_TURNS", 10)
    args = Namespace(**{flag.dest: flag.default for flag in FRONT_END_FLAGS})
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield HttpServer(app, args, sock), sock.getsockname()[1]


async def start(server: HttpServer) -> asyncio.Task:
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    return serving


async def ask(port: int, path: bytes, limit: int = 1 << 16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    writer.write(REQUEST % path)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    return reader, writer


def test_responses_are_written_to_their_end_as_long_as_one_after_the_other_gets_there(server, caplog):
    http, port = server

    async def go() -> list[bytes]:
        serving = await start(http)
        asked = [await ask(port, b"%d" % number) for number in range(16)]
        reading = asyncio.gather(*(reader.read() for reader, _ in asked))
        http.stop(60)
        await http.flush(30)  # In all more than three times as long as the server waits for the next.
        await serving
        for _, writer in asked:
            writer.close()
        return await reading

    with caplog.at_level(logging.WARNING):
        assert all(b"the end" in body for body in asyncio.run(asyncio.wait_for(go(), 30)))
    assert "cut" not in caplog.text


def test_a_client_that_does_not_read_is_cut_and_the_server_ends(server, caplog):
    http, port = server

    async def go() -> None:
        serving = await start(http)
        _, writer = await ask(port, b"big", limit=1 << 10)
        writer.transport.pause_reading()
        http.stop(3600)
        await http.flush(3600)
        await serving
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(go(), 30))
    assert "1 responses are cut" in caplog.text
