"""User middleware (`--middleware`): ASGI classes as they are, functions through our own adapter.

A function has Starlette's shape: `async def name(request, call_next)` returning a response.
The adapter forwards each chunk as it comes and replays to the application what the function
read of the body.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hardpoint.errors import ConfigError, HardpointError
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.refs import resolve_obj_by_qualname

CallNext = Callable[[Request], Awaitable[Response]]
MiddlewareFunction = Callable[[Request, CallNext], Awaitable[Response]]


def load_middleware(path: str) -> Any:
    """Import what `--middleware` names: a class or a coroutine function.

    Raises ConfigError naming the path.
    """
    try:
        found = resolve_obj_by_qualname(path)
    except (HardpointError, ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--middleware {path!r} cannot be used: {error}",
            code="middleware-import",
            origin="--middleware",
            fix="give the import path of a class or coroutine function, such as my_package.web.MyMiddleware",
        ) from error
    if not inspect.isclass(found) and not inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"--middleware {path!r} is a {type(found).__name__}, not a class or a coroutine function",
            code="middleware-type",
            origin="--middleware",
        )
    return found


def add_user_middleware(app: FastAPI, paths: Sequence[str]) -> None:
    """Wrap the application; the first path sees a request first.

    Starlette puts what is added last outermost, hence the reversed order.
    """
    for path, found in reversed([(path, load_middleware(path)) for path in paths]):
        if inspect.isclass(found):
            app.add_middleware(cast("Any", found))
        else:
            app.add_middleware(FunctionMiddleware, dispatch=found)
        ledger.record("override", "middleware", path, detail="wraps every request (--middleware)")


class FunctionMiddleware:
    """Runs a `(request, call_next)` function around the application, without buffering."""

    def __init__(self, app: ASGIApp, dispatch: MiddlewareFunction) -> None:
        self._app = app
        self._dispatch = dispatch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the function, then send the response it returned."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Replay(receive)
        call = _InnerCall(self._app, body)
        try:
            response = await self._dispatch(Request(scope, body.for_middleware, send), call.next)
            await response(scope, body.for_application, send)
            await call.finish()
        finally:
            await call.cancel()


class _Replay:
    """Remembers what the function read of the body, so that the application reads it again."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: list[Message] = []

    async def for_middleware(self) -> Message:
        message = await self._receive()
        self._read.append(message)
        return message

    async def for_application(self) -> Message:
        if self._read:
            return self._read.pop(0)
        return await self._receive()


class _Relay:
    """Hands one message at a time from the application to whoever sends the response."""

    def __init__(self) -> None:
        self._message: Message | None = None
        self._closed = False
        self._filled = asyncio.Event()
        self._free = asyncio.Event()

    async def put(self, message: Message) -> None:
        """Wait until the last message was taken, then leave this one."""
        while self._message is not None:
            self._free.clear()
            await self._free.wait()
        self._message = message
        self._filled.set()

    async def take(self) -> Message | None:
        """The next message; None once the application has ended."""
        await self._filled.wait()
        message, self._message = self._message, None
        if not self._closed:
            self._filled.clear()
        self._free.set()
        return message

    def close(self) -> None:
        """No message will follow."""
        self._closed = True
        self._filled.set()


class _InnerCall:
    """One run of the application below a function, started by `call_next`."""

    def __init__(self, app: ASGIApp, body: _Replay) -> None:
        self._app = app
        self._body = body
        self._task: asyncio.Task[None] | None = None
        self._relay = _Relay()
        self._body_ended = False

    async def next(self, request: Request) -> Response:
        """Start the application and return its response as soon as the status is known."""
        self._task = asyncio.create_task(self._run(request.scope))
        message = await self._relay.take()
        if message is None:
            await self._task
            raise RuntimeError("the application sent no response")
        return _PassedResponse(message, self._chunks())

    async def _run(self, scope: Scope) -> None:
        try:
            await self._app(scope, self._body.for_application, self._relay.put)
        finally:
            self._relay.close()

    async def _chunks(self) -> AsyncIterator[bytes]:
        while not self._body_ended:
            message = await self._relay.take()
            if message is None:
                break
            if message["type"] == "http.response.body":
                self._body_ended = not message.get("more_body", False)
                if message.get("body"):
                    yield message["body"]

    async def finish(self) -> None:
        """Let the application end, and raise what it raised.

        One whose response was replaced is ended instead: nobody listens to it.
        """
        if self._task is None:
            return
        if not self._body_ended and not self._task.done():
            await self.cancel()
            return
        await self._task

    async def cancel(self) -> None:
        """End the application if it still runs: the client left, or the function raised."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task


class _PassedResponse(Response):
    """The application's response as the function sees it: status, headers, an async body."""

    def __init__(self, start: Message, body: AsyncIterator[bytes]) -> None:
        self.status_code = start["status"]
        self.raw_headers = list(start.get("headers", []))
        self.body_iterator: Any = body
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send status and headers, then each chunk as it comes."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self.body_iterator:
            data = chunk.encode() if isinstance(chunk, str) else bytes(chunk)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if self.background is not None:
            await self.background()
