"""Where workers meet."""

from __future__ import annotations

import socket


def free_tcp_address() -> str:
    """A `tcp://` address on this machine whose port is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
