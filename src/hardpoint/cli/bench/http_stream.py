"""One streamed POST over a connection of its own, read event by event: asyncio and the standard library only.

A load generator shares the machine with what it measures, so this does little per token.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

# One line is one event; with log-probabilities some kilobytes.
_MAX_LINE_BYTES = 1 << 22
_MAX_ERROR_BYTES = 1 << 16


class EndpointError(Exception):
    """The server cannot be reached, refuses, or breaks off. The text says which."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go.

    headers  sent with every request, e.g. Authorization
    """

    host: str
    port: int
    base: str
    headers: tuple[tuple[str, str], ...] = ()
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, url: str, headers: dict[str, str] | None = None, insecure: bool = False) -> Endpoint:
        """Read a URL such as http://127.0.0.1:8000. Raises ValueError when it is not one."""
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server")
        tls = None
        if parts.scheme == "https":
            tls = ssl.create_default_context()
            if insecure:
                tls.check_hostname = False
                tls.verify_mode = ssl.CERT_NONE
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, parts.path.rstrip("/"), tuple((headers or {}).items()), tls)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Post a body and yield the JSON of each event until [DONE]. Raises EndpointError."""
        reader, writer = await self._open("POST", path, json.dumps(body).encode())
        try:
            headers = await _head(reader)
            lines = _chunked(reader) if "chunked" in headers.get("transfer-encoding", "") else _until_closed(reader)
            async for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if event.get("error"):
                    raise EndpointError(f"the server says: {_message(event)}")
                yield event
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise EndpointError(f"the answer breaks off: {error or type(error).__name__}") from None
        finally:
            writer.close()

    async def get(self, path: str) -> Any:
        """The JSON at a path. Raises EndpointError."""
        reader, writer = await self._open("GET", path, b"")
        try:
            headers = await _head(reader)
            if "chunked" in headers.get("transfer-encoding", ""):
                body = b"".join([line async for line in _chunked(reader)])
            else:
                body = await reader.read(int(headers.get("content-length", -1)))
            return json.loads(body)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise EndpointError(f"the answer cannot be read: {error}") from None
        finally:
            writer.close()

    async def _open(self, method: str, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls, limit=_MAX_LINE_BYTES)
        except OSError as error:
            raise EndpointError(f"{self.host}:{self.port} does not answer: {error}") from None
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = [f"{method} {self.base}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in self.headers]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        return reader, writer


async def _head(reader: asyncio.StreamReader) -> dict[str, str]:
    """Read the status line and the headers. Raises EndpointError unless the status is 200."""
    words = (await reader.readline()).split(maxsplit=2)
    if len(words) < 2 or not words[1].isdigit():
        raise EndpointError("the server does not speak HTTP")
    headers: dict[str, str] = {}
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    if int(words[1]) != 200:
        body = await reader.read(_MAX_ERROR_BYTES)
        raise EndpointError(f"status {words[1].decode()}: {_message(_json(body))}")
    return headers


async def _chunked(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a chunked body; chunks need not end where lines do."""
    rest = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        rest += await reader.readexactly(size)
        await reader.readexactly(2)
        if len(rest) > _MAX_LINE_BYTES:
            raise EndpointError("one line of the answer is too long")
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


async def _until_closed(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := await reader.readline():
        yield line


def _json(body: bytes) -> Any:
    start = body.find(b"{")
    end = body.rfind(b"}")
    try:
        return json.loads(body[start : end + 1])
    except ValueError:
        return body.decode("utf-8", "replace")[:300]


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
