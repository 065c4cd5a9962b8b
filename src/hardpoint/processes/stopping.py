"""SIGINT, SIGTERM and SIGHUP: the first one asks the server to end, later ones change nothing."""

from __future__ import annotations

import _thread
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from hardpoint.log import init_logger

logger = init_logger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Code that holds locks which nobody could give back for it, or whose exceptions nobody sees: an import that is left in
# the middle of its locks has every later import wait for ever. None of it waits for long.
_NOT_WITHIN = frozenset({"importlib._bootstrap", "importlib._bootstrap_external", "logging", "weakref", "_weakrefset"})
_AGAIN_S = 0.005


class StopRequested(BaseException):
    """Raised in the main thread when the server is asked to end before it serves."""


class StopSignals:
    """Until `listen_with`, a signal interrupts what the main thread does, once it may; then it calls a function."""

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
        if self._listener is None and frame is not None and frame.f_globals.get("__name__") in _NOT_WITHIN:
            # No threading.Thread, whose own locks may be held here, too.
            _thread.start_new_thread(_send_again, (number,))
            return
        name = signal.Signals(number).name
        if self.requested is not None:
            logger.info("%s: already stopping", name)
            return
        self.requested = name
        logger.info("%s: stopping", name)
        if self._listener is None:
            raise StopRequested(name)
        self._listener()


def _send_again(number: int) -> None:
    time.sleep(_AGAIN_S)
    os.kill(os.getpid(), number)
