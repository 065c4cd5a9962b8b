"""Where one request's outputs wait for the coroutine that reads them."""

from __future__ import annotations

import asyncio

from hardpoint.types.outputs import PoolingRequestOutput, RequestOutput
from hardpoint.types.sampling_params import RequestOutputKind

Item = RequestOutput | PoolingRequestOutput


class RequestOutputCollector:
    """Holds at most one output: one that comes before the last was read is merged into it.

    So a slow reader costs no memory and never falls behind. An exception put here is raised once
    the reader has got what came before it.
    """

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        self.request_id = request_id
        self._joins_deltas = output_kind is RequestOutputKind.DELTA
        self._item: Item | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, item: Item | Exception) -> None:
        """Hand an output or an error over; never blocks."""
        held = self._item
        if self._error is not None:
            return
        if isinstance(item, Exception):
            self._error = item
        elif isinstance(held, RequestOutput) and isinstance(item, RequestOutput):
            held.add(item, aggregate=self._joins_deltas)
        else:
            self._item = item
        self._ready.set()

    async def get(self) -> Item:
        """Wait for the next output; raises the error that ended the request."""
        while True:
            item = self.get_nowait()
            if item is not None:
                return item
            await self._ready.wait()

    def get_nowait(self) -> Item | None:
        """The next output if there is one; raises the error that ended the request."""
        item, self._item = self._item, None
        if item is None and self._error is not None:
            error, self._error = self._error, None
            self._ready.clear()
            raise error
        if self._error is None:
            self._ready.clear()
        return item

    def close(self) -> None:
        """Drop what was not read."""
        self._item = self._error = None
        self._ready.clear()
