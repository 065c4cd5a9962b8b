"""Where one request's outputs wait for the coroutine that reads them."""

from __future__ import annotations

import asyncio

from hardpoint.types.outputs import PoolingRequestOutput, RequestOutput
from hardpoint.types.sampling_params import RequestOutputKind

Item = RequestOutput | PoolingRequestOutput | Exception


class RequestOutputCollector:
    """Holds at most one output: one that comes before the last was read is merged into it.

    So a slow reader costs no memory and never falls behind. An exception put here is raised by
    the reader's next `get`.
    """

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        self.request_id = request_id
        self._joins_deltas = output_kind is RequestOutputKind.DELTA
        self._item: Item | None = None
        self._ready = asyncio.Event()

    def put(self, item: Item) -> None:
        """Hand an output or an error over; never blocks."""
        held = self._item
        if isinstance(held, Exception):
            return
        if isinstance(held, RequestOutput) and isinstance(item, RequestOutput):
            held.add(item, aggregate=self._joins_deltas)
        else:
            self._item = item
        self._ready.set()

    async def get(self) -> RequestOutput | PoolingRequestOutput:
        """Wait for the next output; raises the error that ended the request."""
        while self._item is None:
            await self._ready.wait()
        return self._take(self._item)

    def get_nowait(self) -> RequestOutput | PoolingRequestOutput | None:
        """The next output if there is one; raises the error that ended the request."""
        return None if self._item is None else self._take(self._item)

    def close(self) -> None:
        """Drop what was not read."""
        self._item = None
        self._ready.clear()

    def _take(self, item: Item) -> RequestOutput | PoolingRequestOutput:
        self._item = None
        self._ready.clear()
        if isinstance(item, Exception):
            raise item
        return item
