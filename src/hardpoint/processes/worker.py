"""One rank of the `mp` executor: builds its worker, then answers the engine core's calls."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

from hardpoint.config.wire import from_wire
from hardpoint.contracts.worker import WorkerWrapperBase
from hardpoint.extensions.rows import Role
from hardpoint.links.children import ParentLink
from hardpoint.links.codec import Decoder
from hardpoint.links.worker_link import serve_calls
from hardpoint.processes.child import end_process, run_child
from hardpoint.types.messages import Ready, WorkerStart

_starts = Decoder(WorkerStart)


def _serve(link: ParentLink) -> int:
    start = _starts.decode(link.channel.receive())
    config = from_wire(start.config)
    _outlive_sigterm(config.shutdown_timeout)
    wrapper = WorkerWrapperBase(rpc_rank=0, global_rank=start.rank)
    arguments = {
        "vllm_config": config,
        "local_rank": start.local_rank,
        "rank": start.rank,
        "distributed_init_method": start.distributed_init_method,
        "is_driver_worker": start.is_driver_worker,
    }
    wrapper.init_worker([arguments])
    link.send(Ready())
    try:
        serve_calls(link.channel, wrapper)
        link.end_with_parent()
    finally:
        wrapper.shutdown()
    return 0


def _outlive_sigterm(drain_s: float) -> None:
    """On SIGTERM, stay for the drain time: a service manager signals all processes at once.

    Whoever stops us orderly closes the link, which ends the loop at once.
    """

    def later(number: int, frame: object) -> None:
        if drain_s <= 0:
            os._exit(128 + number)
        timer = threading.Timer(drain_s, os._exit, (128 + number,))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, later)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker until its link closes; return the exit status."""
    return run_child(sys.argv[1:] if argv is None else argv, Role.WORKER, "worker", _serve)


if __name__ == "__main__":
    end_process(main())
