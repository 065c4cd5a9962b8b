"""The server's listening socket, taken before anything slow happens."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from argparse import Namespace
from pathlib import Path

from hardpoint.errors import StartError

_BACKLOG = 2048
_ANY_IPV4 = "0.0.0.0"


class Listener:
    """A socket that listens already: connections wait in its queue until the model is loaded."""

    def __init__(self, sock: socket.socket, where: str, path: Path | None = None) -> None:
        self.socket = sock
        # For people: a URL, or the socket's path.
        self.where = where
        self._path = path

    def close(self) -> None:
        """Stop listening and remove the socket file, if it is one."""
        self.socket.close()
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()


def listen(args: Namespace) -> Listener:
    """Listen where `--uds`, or `--host` and `--port`, say.

    Raises StartError naming the address when it is taken, forbidden or cannot be resolved.
    """
    if getattr(args, "uds", None):
        return _listen_on_path(Path(args.uds))
    host, port = getattr(args, "host", None) or _ANY_IPV4, args.port
    sock = _bound(host, port)
    scheme = "https" if getattr(args, "ssl_keyfile", None) else "http"
    shown = "localhost" if host in (_ANY_IPV4, "::") else f"[{host}]" if ":" in host else host
    return Listener(sock, f"{scheme}://{shown}:{sock.getsockname()[1]}")


def _bound(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise StartError(
            f"the host {host!r} cannot be resolved: {error}",
            code="host-unknown",
            origin="--host",
            fix="give an address of this machine, or leave --host out to listen on all of them",
        ) from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # A port whose last server has just ended (TIME_WAIT) is free; one that somebody listens on is not.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind(address)
        # Listening at once is what makes the port ours: before, a second server could bind it too.
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise _address_error(error, host, port) from None
    return sock


def _address_error(error: OSError, host: str, port: int) -> StartError:
    place = f"port {port} on {host}"
    if error.errno == errno.EADDRINUSE:
        what, fix = f"{place} is in use", "stop what listens there, or choose another with --port"
    elif error.errno == errno.EACCES:
        what, fix = f"{place} may not be used by this user", "choose a port of 1024 or more with --port"
    elif error.errno == errno.EADDRNOTAVAIL:
        what, fix = f"{host} is not an address of this machine", "leave --host out, or give one of this machine"
    else:
        what, fix = f"{place} cannot be listened on: {error.strerror}", "choose another with --host and --port"
    return StartError(what, code="port", origin="--host, --port", fix=fix)


def _listen_on_path(path: Path) -> Listener:
    _clear_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise StartError(
            f"the socket {path} cannot be made: {error.strerror or error}",
            code="uds",
            origin="--uds",
            fix="name a path of at most 107 bytes in a folder this user may write",
        ) from None
    return Listener(sock, f"unix:{path}", path)


def _clear_stale(path: Path) -> None:
    """Remove a socket file nobody listens on any more; anything else in that place is an error."""
    try:
        is_socket = stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return  # Nothing there; what else may be wrong shows when binding.
    if not is_socket:
        raise StartError(f"{path} exists and is not a socket", code="uds", origin="--uds", fix="name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(os.fspath(path)) == 0:
            raise StartError(
                f"another server listens on {path}", code="uds", origin="--uds", fix="stop it, or name another path"
            )
    path.unlink(missing_ok=True)
