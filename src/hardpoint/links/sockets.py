"""ZeroMQ sockets in a private folder: one ROUTER in the engine core, one DEALER per front end."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq

from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.links.codec import MAX_MESSAGE_BYTES

_PREFIX = "hp-"
# The kernel's limit for a socket path is 104 to 108 bytes with its end mark.
_MAX_PATH_BYTES = 100
_LONGEST_NAME = len("hp-1234567-12345678/core.sock")
_STALE_AFTER_S = 3600.0


class SocketFolder:
    """A folder only this user can enter, for the sockets of one engine.

    It is needed until everybody is connected: an established connection outlives its file,
    so the folder is removed then, and no crash later can leave one behind.
    """

    def __init__(self) -> None:
        base = _base_folder()
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
        self._owner_pid = os.getpid()

    def address(self, name: str) -> str:
        """The ZeroMQ address of the socket `name`."""
        return f"ipc://{self.path / name}.sock"

    def remove(self) -> None:
        """Remove the folder; a second time does nothing."""
        if os.getpid() == self._owner_pid:
            remove_socket_folder(self.path)


def remove_socket_folder(path: Path) -> None:
    """Remove a socket folder wherever it was made, e.g. in a child whose parent died."""
    shutil.rmtree(path, ignore_errors=True)


def _base_folder() -> str:
    given = envs.VLLM_RPC_BASE_PATH
    base = os.path.expanduser(given) if given else tempfile.gettempdir()
    fits = len(os.fsencode(base)) + 1 + _LONGEST_NAME <= _MAX_PATH_BYTES
    if not fits and given:
        raise ConfigError(
            f"VLLM_RPC_BASE_PATH={given!r} is too long for a socket path ({_MAX_PATH_BYTES} bytes with the file name)",
            code="rpc-base-path",
            origin="the process environment",
            fix="name a shorter folder",
        )
    base = base if fits else "/tmp"
    if not os.access(base, os.W_OK | os.X_OK):
        raise ConfigError(
            f"sockets cannot be made in {base!r}: it is not a folder this user may write",
            code="rpc-base-path",
            origin="VLLM_RPC_BASE_PATH" if given else "TMPDIR",
            fix="set VLLM_RPC_BASE_PATH to a folder this user may write",
        )
    return base


def _sweep(base: str) -> None:
    """Remove what a start that was killed together with its engine left behind an hour ago or more."""
    try:
        entries = [entry for entry in os.scandir(base) if entry.name.startswith(_PREFIX)]
    except OSError:
        return
    for entry in entries:
        try:
            facts = entry.stat(follow_symlinks=False)
            pid = int(entry.name.removeprefix(_PREFIX).split("-")[0])
        except (OSError, ValueError):
            continue
        old = time.time() - facts.st_mtime > _STALE_AFTER_S
        if old and facts.st_uid == os.getuid() and entry.is_dir(follow_symlinks=False) and not _exists(pid):
            remove_socket_folder(Path(entry.path))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def bind_router(context: zmq.Context[Any], address: str) -> Any:
    """The engine core's socket: frames are `identity, type byte, message`."""
    sock = context.socket(zmq.ROUTER)
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    _limits(sock, linger_ms=2000)
    sock.bind(address)
    return sock


def connect_dealer(context: zmq.Context[Any], address: str, client_index: int) -> Any:
    """A front end's socket; frames are `type byte, message` out and `message` in."""
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.IDENTITY, identity_of(client_index))
    _limits(sock, linger_ms=0)
    sock.connect(address)
    return sock


def identity_of(client_index: int) -> bytes:
    """The ROUTER identity of one front end."""
    return b"client-%d" % client_index


def _limits(sock: Any, linger_ms: int) -> None:
    sock.setsockopt(zmq.LINGER, linger_ms)
    # Queues are bounded by the admission limits, in requests and tokens, not by dropping messages.
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
