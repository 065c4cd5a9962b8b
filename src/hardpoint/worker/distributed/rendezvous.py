"""How ranks find each other: a store on the first rank, which listens on this machine only where that suffices."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BACKLOG = 256
# Linux: ask for an interface's address.
_SIOCGIFADDR = 0x8915
_DEFAULT_TIMEOUT = timedelta(minutes=30)


def join_world(method: str, backend: str, rank: int, world_size: int, timeout: timedelta | None) -> None:
    """Make this process rank `rank` of torch.distributed's world.

    method  "tcp://host:port" or another address that torch.distributed knows, such as "env://"
    """
    address = urlsplit(method)
    limit = timeout or _DEFAULT_TIMEOUT
    if address.scheme != "tcp" or address.hostname not in _LOOPBACK or address.port is None:
        if address.hostname is not None and address.port is not None:
            _use_interface(_interface_towards(address.hostname, address.port))
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=world_size, timeout=limit)
        return
    # The host's name may lead to an address that others can reach.
    _use_interface(_loopback_interface())
    store = _store_on(address.hostname, address.port, rank, world_size, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def _store_on(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    if rank:
        return dist.TCPStore(host, port, world_size, False, timeout, wait_for_workers=False)
    # torch itself would listen on every address of the machine.
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        return dist.TCPStore(
            host, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _use_interface(name: str) -> None:
    """Have gloo listen there unless the user chose; by itself it takes the address that the host's name leads to."""
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _interface_towards(host: str, port: int) -> str:
    """The network interface through which `host` is reached; empty when that cannot be found out."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # Sends nothing.
            own = probe.getsockname()[0]
            names = (name for _, name in socket.if_nameindex())
            return next((name for name in names if _ipv4_of(probe, name) == own), "")
    except OSError:
        return ""


def _ipv4_of(sock: socket.socket, interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return ""  # It has none.


def _loopback_interface() -> str:
    names = {name for _, name in socket.if_nameindex()}
    return "lo" if "lo" in names else "lo0"
