"""Where workers meet."""

from __future__ import annotations

import socket


class MeetingPoint:
    """A `tcp://` address of this machine that nobody else gets until `release`.

    The socket is bound and does not listen: the system hands the port to nobody, and the rank that does
    listen there can take it.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"

    def release(self) -> None:
        """Let go of the port, once the ranks have met. A second time does nothing."""
        self._socket.close()
