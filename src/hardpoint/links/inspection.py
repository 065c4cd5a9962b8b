"""Asking a short-lived child about a model class, so that this process neither imports it nor touches a device."""

from __future__ import annotations

import contextlib
import time

from hardpoint.links.channel import ChannelClosed
from hardpoint.links.children import spawn_child
from hardpoint.links.codec import Encoder
from hardpoint.links.workers import wait_for_report
from hardpoint.types.messages import Inspect, Inspected

_MODULE = "hardpoint.processes.inspector"
_STOP_WAIT_S = 1.0


def inspect_in_child(ref: str, timeout_s: float = 120.0) -> Inspected:
    """What the model class "module:Class" declares.

    Raises the like of what its import raised, or StartError when the child died or took too long.
    """
    child = spawn_child(_MODULE, "inspector")
    with contextlib.suppress(ChannelClosed):  # Reported below, with how the child ended.
        child.channel.send(Encoder().encode(Inspect(ref)))
    try:
        report = wait_for_report(child, time.monotonic() + timeout_s)
    finally:
        child.kill()
        child.stop(_STOP_WAIT_S)
    assert isinstance(report, Inspected)
    return report
