"""Sharing an event loop: who finds work without end lets the others have their turn."""

from __future__ import annotations

import asyncio
import time

# A turn of ours; what waits meanwhile, such as /health, waits about as long.
_TURN_S = 0.005


class Turn:
    """For one coroutine, to call `over` after each piece of work.

    Awaiting something that is there already does not let anybody else run. Within a turn several pieces are done
    at once, so that readers who cannot keep up get what they missed as one.
    """

    def __init__(self, length_s: float = _TURN_S) -> None:
        self._length_s = length_s
        self._began = time.monotonic()

    async def over(self) -> None:
        """Let the others run if the turn has lasted long enough."""
        if time.monotonic() - self._began >= self._length_s:
            await asyncio.sleep(0)
            self._began = time.monotonic()
