"""Waiting for what is bound to happen, such as the end of a process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

# How long to wait for what is bound to happen: long, as a busy machine is slow, and only a fault takes all of it.
PATIENCE_S = 60.0


def ended(pid: int, within_s: float = PATIENCE_S) -> bool:
    """Whether the process is gone, or a zombie nobody reaps, in time."""
    return wait_until(lambda: not running(pid), within_s)


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    deadline, pause_s = time.monotonic() + within_s, 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        # Looking takes time that what is waited for may need.
        pause_s = min(0.1, 1.3 * pause_s)
    return True


async def happens(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Let this event loop go on until the condition holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)
