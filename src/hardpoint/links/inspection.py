"""Asking a short-lived child about a model class, so that this process neither imports it nor touches a device."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from tempfile import TemporaryFile
from typing import IO

from hardpoint.errors import HardpointError
from hardpoint.links.channel import ChannelClosed
from hardpoint.links.children import Child, spawn_child
from hardpoint.links.codec import Encoder
from hardpoint.links.workers import wait_for_report
from hardpoint.types.messages import Inspect, Inspected

_MODULE, _ROLE = "hardpoint.processes.inspector", "inspector"
_TAIL_BYTES = 16_384


def inspect_in_child(ref: str, timeout_s: float = 120.0) -> Inspected:
    """What the model class "module:Class" is and declares.

    What the child writes is passed on if it succeeds. Raises the like of what its import raised, or StartError
    when the child died or took too long; what the child wrote, with its role and pid before each line, is in the
    error's `child_output` then.
    """
    with TemporaryFile() as out, TemporaryFile() as err:
        with _running(ref, (out, err)) as child:
            try:
                report = wait_for_report(child, time.monotonic() + timeout_s)
            except HardpointError as error:
                failure: HardpointError | None = error
            else:
                failure = None
        if failure is not None:
            # Of a chain of errors, the first is the one of the plugin.
            trace = getattr(failure, "child_traceback", "").partition("\nThe above exception was the direct cause")[0]
            written = [_tail(out), _tail(err), trace]
            failure.child_output = _tagged("\n".join(written), child.pid)  # type: ignore[attr-defined]
            raise failure
        _pass_on(out, sys.stdout)
        _pass_on(err, sys.stderr)
    assert isinstance(report, Inspected)
    return report


@contextlib.contextmanager
def _running(ref: str, output: tuple[IO[bytes], IO[bytes]]) -> Iterator[Child]:
    child = spawn_child(_MODULE, _ROLE, output=output)
    with contextlib.suppress(ChannelClosed):  # Whoever waits for the report tells how the child ended.
        child.channel.send(Encoder().encode(Inspect(ref)))
    try:
        yield child
    finally:
        child.end()


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL_BYTES))
    return file.read().decode(errors="replace")


def _tagged(text: str, pid: int) -> str:
    return "\n".join(f"[{_ROLE} {pid}] {line}" for line in text.splitlines() if line.strip())


def _pass_on(file: IO[bytes], stream: IO[str] | None) -> None:
    text = _tail(file)
    if text and stream is not None:
        stream.write(text)
        stream.flush()
