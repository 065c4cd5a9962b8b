"""Starting worker processes: all at once, then waiting for each."""

from __future__ import annotations

import time
from collections.abc import Sequence

import hardpoint.errors
from hardpoint.errors import HardpointError, StartError
from hardpoint.links.channel import ChannelClosed
from hardpoint.links.children import Child, remaining_s, spawn_child
from hardpoint.links.codec import Encoder
from hardpoint.links.worker_link import WorkerLink
from hardpoint.types.messages import Hello, Inspected, Ready, StartFailed, WorkerStart

_MODULE = "hardpoint.processes.worker"
_encoder = Encoder()


class WorkerProcess:
    """One rank in a process of its own. `link` is there once `wait_ready` has returned."""

    def __init__(self, start: WorkerStart, index: int) -> None:
        self.child: Child = spawn_child(_MODULE, "worker", index)
        self.link: WorkerLink
        try:
            self.child.channel.send(_encoder.encode(start))
        except ChannelClosed:
            return  # wait_ready reports how it ended.

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the worker object exists (no device, no model yet).

        Raises what stopped the worker, or StartError.
        """
        deadline = time.monotonic() + timeout_s
        wait_for_ready(self.child, deadline)
        self.link = WorkerLink(self.child.channel, self.child.name, self._how_it_ended)

    def _how_it_ended(self) -> str:
        # The pipe closes a moment before the system tells how the process ended.
        self.child.wait(_EXIT_WAIT_S)
        return f"{self.child.name} (pid {self.child.pid}) {self.child.status or 'closed its link'}"


def start_workers(starts: Sequence[WorkerStart], timeout_s: float, first_index: int = 0) -> list[WorkerProcess]:
    """Start one process per entry and wait for all; when one fails, none is left.

    first_index  the number of the first in names
    Raises what stopped the first that failed.
    """
    workers: list[WorkerProcess] = []
    try:
        workers.extend(WorkerProcess(start, first_index + number) for number, start in enumerate(starts))
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            worker.wait_ready(remaining_s(deadline))
    except BaseException:
        for worker in workers:
            worker.child.kill()
        for worker in workers:
            worker.child.end()
        raise
    return workers


def wait_for_ready(child: Child, deadline: float) -> Ready:
    """Return the child's Ready message; errors as `wait_for_report`."""
    report = wait_for_report(child, deadline)
    assert isinstance(report, Ready)
    return report


def wait_for_report(child: Child, deadline: float) -> Ready | Inspected:
    """Return what the child reports once it has done what it was started for.

    Raises the like of the error that stopped it, or StartError when it ended without a word
    or says nothing until `deadline` (monotonic seconds).
    """
    try:
        while True:
            message = child.receive(remaining_s(deadline))
            if isinstance(message, StartFailed):
                raise start_error(message, child.name)
            if not isinstance(message, Hello):
                return message
    except TimeoutError:
        raise StartError(
            f"the {child.name} process (pid {child.pid}) is not ready in time",
            code="start-timeout",
            fix="raise VLLM_ENGINE_READY_TIMEOUT_S if the model needs longer to load",
        ) from None
    except ChannelClosed:
        child.wait(_EXIT_WAIT_S)
        raise StartError(
            f"the {child.name} process (pid {child.pid}) {child.status or 'closed its link'} before it was ready",
            code="start-died",
            fix=_fix_for(child),
        ) from None


_EXIT_WAIT_S = 5.0


def _fix_for(child: Child) -> str:
    if child.status is not None and child.status.signal == 9:
        return "it was killed from outside: most often there was not enough memory (see the kernel log)"
    return "see its output above; VLLM_LOGGING_LEVEL=DEBUG shows more"


def start_error(message: StartFailed, name: str) -> HardpointError:
    """The like of the error a child reported, with the child's traceback as `child_traceback`."""
    kind = getattr(hardpoint.errors, message.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, HardpointError)):
        kind = StartError
    error = kind(message.what, code=message.code, origin=message.origin or name, fix=message.fix)
    error.child_traceback = message.traceback  # type: ignore[attr-defined]
    return error
