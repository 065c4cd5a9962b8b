"""How ranks find each other: a store on the first rank, which listens on this machine only where that suffices."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BACKLOG = 256
_DEFAULT_TIMEOUT = timedelta(minutes=30)


def join_world(method: str, backend: str, rank: int, world_size: int, timeout: timedelta | None) -> None:
    """Make this process rank `rank` of torch.distributed's world.

    method  "tcp://host:port" or another address that torch.distributed knows, such as "env://"
    """
    address = urlsplit(method)
    limit = timeout or _DEFAULT_TIMEOUT
    if address.scheme != "tcp" or address.hostname not in _LOOPBACK or address.port is None:
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=world_size, timeout=limit)
        return
    # The host's name may lead to an address that others can reach.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
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


def _loopback_interface() -> str:
    names = {name for _, name in socket.if_nameindex()}
    return "lo" if "lo" in names else "lo0"
