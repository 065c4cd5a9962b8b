"""Server-sent events, and ending work whose client has left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hardpoint.front_end.server.errors import ClientLeft, failure_of, report

T = TypeVar("T")
S = TypeVar("S")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode


def event(chunk: dict[str, Any]) -> bytes:
    """One event holding `chunk` as JSON."""
    return b"data: " + _encode(chunk) + b"\n\n"


async def until_disconnected(receive: Receive) -> None:
    """Return when the client closes the connection; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it and raise ClientLeft when the client goes away first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(until_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return await task
    finally:
        watch.cancel()
        await _cancelled(task)


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it has cleaned up; what it raised is of no interest any more."""
    if task.done():
        # To wait for it again would take the traceback from an error that is on its way to the log.
        if not task.cancelled():
            task.exception()
        return
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


class EventStream(Response):
    """A `text/event-stream` response over an async generator of encoded events.

    Open it with `open_stream`, which waits for the first event: a request that cannot run is then
    refused with a status of its own. Later failures are sent as an event with the error body.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        first: asyncio.Future[bytes],
        keep_alive_s: float,
        log_error_stack: bool,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._pending = first
        self._keep_alive_s = keep_alive_s
        self._stack = log_error_stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the client leaves; then close the generator."""
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(until_disconnected(receive))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                # A closed connection can show as a failing send before it shows as a message.
                with contextlib.suppress(OSError):
                    await pump
        finally:
            watch.cancel()
            await _cancelled(pump)
            await _cancelled(self._pending)
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._chunks():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncIterator[bytes]:
        """The events, and an error event when one fails."""
        try:
            async for data in self._events_and_gaps():
                yield data
        except Exception as error:
            failure = failure_of(error)
            report(error, failure, self._stack)
            yield event(failure.body())
            yield DONE

    async def _events_and_gaps(self) -> AsyncIterator[bytes]:
        """The events; with a keep-alive interval, comments in the gaps."""
        while True:
            while not await self._ready():
                yield KEEP_ALIVE
            data = await self._pending
            if not data:
                return
            yield data
            if not self._keep_alive_s:
                break
            self._pending = _next(self._events)
        async for data in self._events:
            yield data

    async def _ready(self) -> bool:
        """Whether the next event is there, waiting for one keep-alive interval at most."""
        if not self._keep_alive_s:
            return True
        await asyncio.wait({self._pending}, timeout=self._keep_alive_s)
        return self._pending.done()


def _next(events: AsyncGenerator[bytes, None]) -> asyncio.Future[bytes]:
    """The next event as a future; empty bytes at the end."""
    return asyncio.ensure_future(anext(events, b""))


async def open_stream(
    request: Request, events: AsyncGenerator[bytes, None], keep_alive_s: float, log_error_stack: bool
) -> EventStream:
    """Wait for the first event, or for one keep-alive interval, and return the response.

    Raises what the generator raised before its first event; ClientLeft when the client went away.
    """
    first = _next(events)

    async def begun() -> None:
        await asyncio.wait({first}, timeout=keep_alive_s or None)

    try:
        await unless_disconnected(request, begun())
        if first.done() and (error := first.exception()) is not None:
            raise error
    except BaseException:
        await _cancelled(first)
        await events.aclose()
        raise
    return EventStream(events, first, keep_alive_s, log_error_stack)


async def merge(sources: list[AsyncGenerator[S, None]]) -> AsyncGenerator[tuple[int, S], None]:
    """Items of several generators as they come, each with its generator's index.

    Closing this closes all of them.
    """
    if len(sources) == 1:
        try:
            async for item in sources[0]:
                yield 0, item
        finally:
            await sources[0].aclose()
        return
    waiting = {asyncio.ensure_future(anext(source, _END)): i for i, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                item = task.result()
                if item is not _END:
                    waiting[asyncio.ensure_future(anext(sources[index], _END))] = index
                    yield index, item
    finally:
        for task in waiting:
            await _cancelled(task)
        for source in sources:
            await source.aclose()


_END: Any = object()
