"""On real sockets: bounded request heads, TLS with renewed certificates, the access log."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import socket
import ssl
import subprocess

from hardpoint.processes.http_server import HttpServer
from process_tools import PATIENCE_S


@contextlib.asynccontextmanager
async def serving(app, **flags):
    """The application on a free port of this machine."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    server = HttpServer(app, argparse.Namespace(**flags), sock)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield sock.getsockname()[1]
    finally:
        server.stop(1)
        await task


async def exchange(port: int, data: bytes) -> bytes:
    """Send bytes; everything that comes back until the connection closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
    async with asyncio.timeout(PATIENCE_S):
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
    writer.close()
    return answer


def error_of(answer: bytes) -> dict:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return json.loads(body)["error"]


def test_heads_are_bounded(make_server, run):
    async def check():
        server = await make_server()
        async with serving(server.app, h11_max_header_count=20, h11_max_incomplete_event_size=100_000) as port:
            few = b"".join(b"x-%d: 1\r\n" % i for i in range(15))
            fine = await exchange(port, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + few + b"\r\n")
            assert fine.startswith(b"HTTP/1.1 200")
            many = b"".join(b"x-%d: 1\r\n" % i for i in range(30))
            answer = await exchange(port, b"GET /health HTTP/1.1\r\n" + many + b"\r\n")
            assert answer.startswith(b"HTTP/1.1 431")
            assert error_of(answer)["code"] == 431
            # A head that never ends is cut off, whether it is one line or many.
            for endless in (b"GET /" + b"a" * 3_000_000, b"GET / HTTP/1.1\r\nx: " + b"a" * 3_000_000):
                answer = await exchange(port, endless)
                assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")) or answer == b""
            # A large body is no head.
            body = json.dumps({"prompt": "hi", "user": "u" * 500_000}).encode()
            request = b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
            answer = await exchange(port, request + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert answer.startswith(b"HTTP/1.1 200")

    run(check())


def test_what_is_no_http_is_answered_in_our_shape(make_server, run):
    async def check():
        server = await make_server()
        async with serving(server.app) as port:
            answer = await exchange(port, b"this is not http\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 400")
            assert error_of(answer)["type"] == "Bad Request"

    run(check())


def test_two_requests_on_one_connection(make_server, run):
    async def check():
        server = await make_server()
        async with serving(server.app) as port:
            one = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
            last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            assert (await exchange(port, one + last)).count(b"HTTP/1.1 200") == 2

    run(check())


def test_leaving_client_is_noticed(make_server, run):
    async def check():
        server = await make_server()
        server.engine.pace_s = 30
        async with serving(server.app) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b'{"prompt": "hi"}'
            head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            await writer.drain()
            while not server.engine.requests:
                await asyncio.sleep(0.005)
            writer.close()
            async with asyncio.timeout(PATIENCE_S):
                while not server.engine.aborted:
                    await asyncio.sleep(0.005)

    run(check())


def test_some_paths_stay_out_of_the_access_log(make_server, run, caplog):
    async def check():
        server = await make_server()
        flags = {"disable_access_log_for_endpoints": "/health, /ping"}
        async with serving(server.app, **flags) as port:
            logging.getLogger("uvicorn").propagate = True
            for path in (b"/health?x=1", b"/version", b"/ping"):
                await exchange(port, b"GET " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")

    access = logging.getLogger("uvicorn.access")
    before = list(access.filters)
    with caplog.at_level("INFO", logger="uvicorn.access"):
        run(check())
    access.filters[:] = before
    logging.getLogger("uvicorn").propagate = False
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert lines
    assert all("/version" in line for line in lines)


# -- TLS ----------------------------------------------------------------------------------------------


def certificate(folder, name: str) -> None:
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
            "-keyout", folder / "key.pem", "-out", folder / "cert.pem",
        ],
        check=True, capture_output=True,
    )  # fmt: skip


async def served_certificate(port: int) -> bytes | None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return der


def test_renewed_certificate_is_used_without_a_restart(make_server, run, tmp_path, monkeypatch):
    monkeypatch.setattr("hardpoint.front_end.server.tls._LOOK_EVERY_S", 0.02)
    certificate(tmp_path, "one")
    flags = {
        "ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem"), "ssl_ciphers": "DEFAULT",
        "enable_ssl_refresh": True,
    }  # fmt: skip

    async def check():
        server = await make_server()
        async with serving(server.app, **flags) as port:
            first = await served_certificate(port)
            (tmp_path / "cert.pem").write_text("half written")
            await asyncio.sleep(0.1)
            assert await served_certificate(port) == first
            certificate(tmp_path, "two")
            async with asyncio.timeout(PATIENCE_S):
                while await served_certificate(port) == first:
                    await asyncio.sleep(0.02)

    run(check())
