"""Processes that plugins started from a server and that nobody else would end.

A server marks its environment; whatever is started from it, directly or by a child,
inherits the mark. Linux only: elsewhere other users' tools have to do.
"""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import time
from pathlib import Path

_VARIABLE = "HARDPOINT_RUN_ID"
_GRACE_S = 1.0
# A dying process closes its pipes a moment before it counts as dead.
_DYING_S = 0.3


_marked_by: dict[int, str] = {}


def mark_run() -> str:
    """Mark what this process starts from now on; returns the mark.

    For servers, not for a user's script. A second call changes nothing; a server started by
    another server's plugin gets a mark of its own. What carries the mark is ended with this process.
    """
    pid = os.getpid()
    if pid not in _marked_by:
        _marked_by[pid] = f"{pid}.{_start_of(pid)}.{secrets.token_hex(8)}"
        atexit.register(_end_at_exit, pid)
    os.environ[_VARIABLE] = _marked_by[pid]
    return _marked_by[pid]


def _end_at_exit(pid: int) -> None:
    if os.getpid() == pid:  # Not in a process forked from it.
        end_strays()


def end_strays() -> int:
    """End every other process that carries this run's mark; returns how many there were.

    Politely first, by force after a second.
    """
    mark = os.environ.get(_VARIABLE)
    if not mark:
        return 0
    found = _marked(mark)
    _signal(found, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    left = found
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = left & _marked(mark)
    _signal(left, signal.SIGKILL)
    return len(found)


def end_orphaned_strays() -> int:
    """`end_strays` for a child whose parent has died: only if the server that set the mark has died too.

    Else that server is there to end what is left. It may have other children that are as they should be, and it
    must find out itself which of its processes ended, and how.
    """
    pid, _, rest = os.environ.get(_VARIABLE, "").partition(".")
    started = rest.partition(".")[0]
    deadline = time.monotonic() + _DYING_S
    while pid.isdigit() and _start_of(int(pid)) == started:
        if time.monotonic() >= deadline:
            return 0
        time.sleep(0.01)
    return end_strays()


def _start_of(pid: int) -> str:
    """When a process was started, in ticks, so that another one with its pid is told apart; empty for a dead one."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if facts[0] in "ZX" else facts[19]


def _marked(mark: str) -> set[int]:
    wanted = f"{_VARIABLE}={mark}".encode()
    found = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in entry.read_bytes().split(b"\0"):
                found.add(int(entry.parent.name))
        except OSError:
            continue  # Another user's, or gone.
    return found - {os.getpid()}


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue
