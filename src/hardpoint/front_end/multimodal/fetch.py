"""The bytes behind a media URL: data:, http(s): and file:, each within bounds. The URLs come from clients."""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from hardpoint.env import envs

_MAX_REDIRECTS = 5
_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)


class MediaFetcher:
    """Fetches what clients point at.

    allowed_local_path  file: URLs below this folder are read; "" = none is
    allowed_domains     http(s): hosts; None or empty = any
    """

    def __init__(self, allowed_local_path: str = "", allowed_domains: Sequence[str] | None = None) -> None:
        self._root = Path(allowed_local_path).expanduser().resolve() if allowed_local_path else None
        self._domains = {name.lower().rstrip(".") for name in allowed_domains or ()}

    def fetch(self, url: str, timeout: float) -> bytes:
        """The bytes of a URL. ValueError saying why they cannot be had.

        timeout  seconds for all of it
        """
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ValueError(f"the URL cannot be read: {error}") from None
        scheme = parts.scheme.lower()
        if scheme == "data":
            return _of_data(url)
        if scheme == "file":
            return self._of_file(parts)
        if scheme in ("http", "https"):
            return self._of_web(url, timeout)
        raise ValueError(f"URLs of the kind {scheme[:20]!r} are not read: give a data:, http:, https: or file: URL")

    # -- files -----------------------------------------------------------------------------------

    def _of_file(self, parts: SplitResult) -> bytes:
        if self._root is None:
            raise ValueError("files are read only with --allowed-local-media-path")
        if parts.netloc not in ("", "localhost"):
            raise ValueError("a file: URL must not name a host")
        name = unquote(parts.path)
        if "\0" in name:
            raise ValueError("the file's name is not valid")
        try:
            path = Path(name).resolve()
            inside = path.is_relative_to(self._root)
        except (OSError, ValueError, RuntimeError):
            inside = False
        if not inside:
            raise ValueError("the file is not below --allowed-local-media-path")
        return _read_file(path)

    # -- the web ---------------------------------------------------------------------------------

    def _of_web(self, url: str, timeout: float) -> bytes:
        ends = time.monotonic() + timeout
        for _ in range(_MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            found = _Download(self._checked_host(parts), parts, ends).run()
            if isinstance(found, bytes):
                return found
            if not envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS:
                raise ValueError("the URL redirects, which VLLM_MEDIA_URL_ALLOW_REDIRECTS=0 forbids")
            url = urljoin(url, found)
            if urlsplit(url).scheme.lower() not in ("http", "https"):
                raise ValueError("the URL redirects to something that is not on the web")
        raise ValueError(f"the URL redirects more than {_MAX_REDIRECTS} times")

    def _checked_host(self, parts: SplitResult) -> str:
        host = (parts.hostname or "").lower().rstrip(".")
        if not host or any(part in parts.netloc for part in "\\@") or parts.username is not None:
            raise ValueError("the URL has no plain host")
        if self._domains and host not in self._domains:
            raise ValueError(f"the host {host[:100]!r} is not among --allowed-media-domains")
        return host


class _Download:
    """One request; its time is bounded as a whole, however slowly the other side sends."""

    def __init__(self, host: str, parts: SplitResult, ends: float) -> None:
        self._parts, self._ends, self._host = parts, ends, host
        self._socket: socket.socket | None = None
        self._late = False

    def run(self) -> bytes | str:
        """The body, or where a redirect leads. ValueError."""
        timer = threading.Timer(self._left(), self._stop)
        timer.daemon = True
        timer.start()
        try:
            return self._ask()
        except (OSError, http.client.HTTPException) as error:
            if self._late or isinstance(error, TimeoutError):
                raise ValueError("the URL did not answer in time") from None
            raise ValueError(f"the URL cannot be fetched: {type(error).__name__}: {error}") from None
        finally:
            timer.cancel()
            if self._socket is not None:
                self._socket.close()

    def _left(self) -> float:
        return max(0.001, self._ends - time.monotonic())

    def _stop(self) -> None:
        self._late = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                self._socket.close()

    def _ask(self) -> bytes | str:
        secure = self._parts.scheme.lower() == "https"
        port = self._port(443 if secure else 80)
        sock = _connect(self._host, port, self._left())
        self._socket = sock
        if secure:
            self._socket = ssl.create_default_context().wrap_socket(sock, server_hostname=self._host)
        connection = http.client.HTTPConnection(self._host, port, timeout=self._left())
        connection.sock = self._socket
        target = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
        try:
            connection.request("GET", target, headers={"User-Agent": "hardpoint", "Accept": "*/*"})
            answer = connection.getresponse()
        except (http.client.InvalidURL, UnicodeError) as error:
            raise ValueError(f"the URL is not valid: {error}") from None
        if answer.status in _REDIRECTS:
            place = answer.headers.get("Location")
            if not place:
                raise ValueError("the URL redirects to nowhere")
            return place
        if answer.status != 200:
            raise ValueError(f"the URL answers with status {answer.status}")
        return self._body(answer)

    def _port(self, usual: int) -> int:
        try:
            return self._parts.port or usual
        except ValueError:
            raise ValueError("the URL's port is not valid") from None

    def _body(self, answer: http.client.HTTPResponse) -> bytes:
        most = max_bytes()
        chunks, size = [], 0
        while chunk := answer.read(_CHUNK):
            size += len(chunk)
            if size > most:
                raise _too_large(most)
            if self._late:
                raise TimeoutError
            chunks.append(chunk)
        if self._late:
            raise TimeoutError
        return b"".join(chunks)


def _connect(host: str, port: int, timeout: float) -> socket.socket:
    """Connect to a host whose addresses are looked at first: the one that is checked is the one that is used."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ValueError(f"the host {host[:100]!r} is not known") from None
    for family, kind, protocol, _, address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        mapped = getattr(ip, "ipv4_mapped", None) or ip
        # Where clouds keep the credentials of a machine.
        if mapped.is_link_local or mapped.is_multicast or mapped.is_unspecified:
            continue
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(timeout)
        try:
            sock.connect(address)
        except OSError:
            sock.close()
            continue
        return sock
    raise ValueError(f"the host {host[:100]!r} cannot be reached")


def _of_data(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise ValueError("the data: URL has no data")
    if len(body) > 4 * max_bytes():
        raise _too_large(max_bytes())
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(unquote(body) if "%" in body else body, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the data: URL is not base64") from None


def _read_file(path: Path) -> bytes:
    most = max_bytes()
    try:
        # A pipe or a device would block, or never end.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(number, "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ValueError("it is no plain file")
            found = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None
    if len(found) > most:
        raise _too_large(most)
    return found


def max_bytes() -> int:
    """Bytes that a media file may have."""
    return int(envs.VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB) << 20


def _too_large(most: int) -> ValueError:
    return ValueError(f"it is larger than {most >> 20} MiB")
