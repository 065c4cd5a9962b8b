"""SIGINT, SIGTERM and SIGHUP: the first one asks the server to end, later ones change nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from hardpoint.log import init_logger

logger = init_logger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(BaseException):
    """Raised in the main thread when the server is asked to end before it serves."""


class StopSignals:
    """Until `listen_with`, a signal interrupts what the main thread does; then it calls a function."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._listener: Callable[[], object] | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            # A SIGHUP that is ignored from the start means nohup: stay that way.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def listen_with(self, listener: Callable[[], object]) -> None:
        """From now on call `listener`, which must be safe in a signal handler. Raises StopRequested if it is late."""
        self._listener = listener
        if self.requested is not None:
            raise StopRequested(self.requested)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is not None:
            logger.info("%s: already stopping", name)
            return
        self.requested = name
        logger.info("%s: stopping", name)
        if self._listener is None:
            raise StopRequested(name)
        self._listener()
