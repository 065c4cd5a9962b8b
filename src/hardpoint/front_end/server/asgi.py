"""Our ASGI middlewares. Each forwards every message at once, so that a stream is never held back."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hardpoint.front_end.server.errors import ApiError, Failure, failure_of, report, route_path
from hardpoint.log import init_logger

logger = init_logger(__name__)

REQUEST_ID_MAX_CHARS = 256
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{REQUEST_ID_MAX_CHARS}}}")


class FaultGuard:
    """Turns an exception nobody handled into a 500 for that request only."""

    def __init__(self, app: ASGIApp, log_error_stack: bool = False) -> None:
        self._app = app
        self._stack = log_error_stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer for the application when it raises before its response began."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if started:
                # The status is sent: ending the connection is all that is left.
                logger.exception("%s %s failed while its answer was being sent", scope["method"], scope["path"])
                raise
            failure = _unhandled(error)
            report(error, failure, self._stack)
            await failure.response()(scope, receive, send)


def _unhandled(error: Exception) -> Failure:
    """A middleware's exception is a server fault, unless it is an HTTP answer."""
    failure = failure_of(error)
    if failure.status < 500 and not isinstance(error, ApiError | StarletteHTTPException):
        failure.status, failure.kind, failure.param = 500, "InternalServerError", None
    return failure


class BodyLimit:
    """Refuses a body past `max_bytes` with 413, by its header or while it arrives."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what is received; the exception is answered by the error handlers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await failure_of(self._too_large()).response()(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> HTTPException:
        # FastAPI's own class: it turns any other exception of a receive into a 400.
        return HTTPException(
            413, f"the request body is larger than {self._max_bytes} bytes", headers={"Connection": "close"}
        )


class RootPath:
    """Tells the application under which path a proxy shows it (`--root-path`).

    Requests are understood with that prefix and without: some proxies strip it.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        stripped = root_path.strip("/")
        self._root_path = f"/{stripped}" if stripped else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the path for routing and for links."""
        if scope["type"] in ("http", "websocket"):
            scope["root_path"] = self._root_path
        await self._app(scope, receive, send)


class RequestIdHeader:
    """Echoes `X-Request-Id`, or a new one, on every answer (`--enable-request-id-headers`)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the header to the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex

        async def with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, with_header)


def valid_request_id(text: str) -> bool:
    """Whether a client's request id is printable ASCII of a sane length."""
    return _REQUEST_ID.fullmatch(text) is not None


class LoadTracker:
    """Counts requests in flight on some routes, until their last byte (`/load`)."""

    def __init__(self, app: ASGIApp, paths: Collection[str], add: Callable[[int], None]) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._add = add

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the request for as long as it runs."""
        if scope["type"] != "http" or route_path(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        self._add(1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._add(-1)
