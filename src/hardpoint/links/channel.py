"""A private two-way byte pipe between a parent and one child: length-prefixed frames over a socket pair."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time

from hardpoint.links.codec import MAX_MESSAGE_BYTES

_HEADER = struct.Struct("<Q")


class ChannelClosed(EOFError):
    """The other end has gone."""


class Channel:
    """One end of the pipe. `send` may be called from any thread, `receive` from one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(left), Channel(right)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Take over an inherited descriptor; it is not passed on to programs started from here."""
        sock = socket.socket(fileno=fd)
        sock.set_inheritable(False)
        return cls(sock)

    def fileno(self) -> int:
        """The descriptor, -1 once closed."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send one frame; blocks while the other end does not read.

        Raises ChannelClosed when there is no other end.
        """
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(len(frame)))
                self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Return the next frame.

        Raises TimeoutError when none begins in `timeout_s`, ChannelClosed at the end.
        """
        self._wait_readable(timeout_s)
        (size,) = _HEADER.unpack(self._read(_HEADER.size))
        if size > MAX_MESSAGE_BYTES:
            raise ChannelClosed(f"a frame of {size} bytes is beyond the limit")
        return bytes(self._read(size))

    def _wait_readable(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            return
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLIN)
        except (OSError, ValueError):
            raise ChannelClosed("closed") from None
        deadline = time.monotonic() + timeout_s
        while not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"nothing arrived in {timeout_s:g} s")

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            try:
                count = self._socket.recv_into(view[filled:], min(size - filled, 1 << 20))
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not count:
                raise ChannelClosed("the other end has gone")
            filled += count
        return data

    def close(self) -> None:
        """Close this end; a blocked `receive` on either end returns with ChannelClosed."""
        with contextlib.suppress(OSError):  # Already closed, or the other end is.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def release(self) -> None:
        """Close only our descriptor of this end, which a child has inherited."""
        self._socket.close()
