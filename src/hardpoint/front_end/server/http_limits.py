"""uvicorn's fast HTTP parser with bounds on a request's head (`--h11-max-*`) and errors in our shape."""

from __future__ import annotations

from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hardpoint.front_end.server.errors import Failure
from hardpoint.front_end.server.settings import ServerSettings

_TOO_LARGE = Failure(431, "Request Header Fields Too Large", "the request's head is too large")


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses a head of too many bytes or header lines, and closes the connection."""

    max_head_bytes = 4194304
    max_header_count = 256

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._in_head = True
        self._head_bytes = 0
        self._too_large = False

    def data_received(self, data: bytes) -> None:
        """Pass data on unless the head it belongs to has used up its bytes."""
        if self._in_head:
            if self._head_bytes > self.max_head_bytes:
                self._refuse(_TOO_LARGE)
                return
            self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A new head."""
        self._in_head, self._too_large = True, False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line; the parser stops at one too many."""
        if len(self.headers) >= self.max_header_count:
            self._too_large = True
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """What follows is the next head."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser cannot read."""
        self._refuse(_TOO_LARGE if self._too_large else Failure(400, "Bad Request", msg))

    def _refuse(self, failure: Failure) -> None:
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(failure.body())
        head = (
            f"HTTP/1.1 {failure.status} {failure.kind}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


def http_protocol(settings: ServerSettings) -> type[BoundedHttpProtocol]:
    """The protocol class with this server's bounds."""

    class Bounded(BoundedHttpProtocol):
        max_head_bytes = settings.h11_max_incomplete_event_size
        max_header_count = settings.h11_max_header_count

    return Bounded
