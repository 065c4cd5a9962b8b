"""Watching processes end."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def ended(pid: int, within_s: float = 10.0) -> bool:
    """Whether the process is gone, or a zombie nobody reaps, in time."""
    return wait_until(lambda: not running(pid), within_s)


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
