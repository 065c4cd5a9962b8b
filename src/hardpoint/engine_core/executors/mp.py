"""One process per worker on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hardpoint.config.wire import to_wire
from hardpoint.engine_core.executors.addresses import MeetingPoint
from hardpoint.engine_core.executors.remote import RemoteExecutor
from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.links.children import remaining_s
from hardpoint.links.workers import WorkerProcess, start_workers
from hardpoint.log import init_logger
from hardpoint.types.messages import WorkerStart

logger = init_logger(__name__)
# For workers to end by themselves once another one has died.
_BEREFT_S = 0.5


class MultiprocExecutor(RemoteExecutor):
    """Starts `world_size` worker processes and ends with them."""

    def _init_executor(self) -> None:
        self._workers: list[WorkerProcess] = []
        if self.parallel_config.nnodes > 1:
            raise ConfigError(
                f"nnodes={self.parallel_config.nnodes}: the mp executor runs on one machine",
                code="executor-nodes",
                fix="drop --nnodes",
            )
        self._meeting_point = MeetingPoint()
        super()._init_executor()

    def _start_workers(self) -> None:
        parallel = self.parallel_config
        first = parallel.data_parallel_rank * parallel.world_size
        self._workers = start_workers(self._starts(), envs.VLLM_ENGINE_READY_TIMEOUT_S, first)
        for worker in self._workers:
            worker.child.on_exit(lambda child: self._worker_ended(f"{child.name} (pid {child.pid}) {child.status}"))

    def _starts(self) -> list[WorkerStart]:
        config = to_wire(self.vllm_config)
        return [
            WorkerStart(
                config=config,
                rank=rank,
                local_rank=rank,
                distributed_init_method=self._meeting_point.address,
                is_driver_worker=rank % self.parallel_config.tensor_parallel_size == 0,
            )
            for rank in range(self.parallel_config.world_size)
        ]

    def _have_met(self) -> None:
        self._meeting_point.release()

    def _send(
        self,
        rank: int,
        method: str | Callable[..., Any],
        timeout: float | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        silent: bool,
    ) -> Future[Any]:
        return self._workers[rank].link.submit(method, args, kwargs, timeout, silent)

    def _end_workers(self) -> None:
        """First by closing their links, then by force."""
        self._meeting_point.release()
        for worker in self._workers:
            worker.link.close()
        # Where one has died the others may wait for it for ever.
        grace_s = envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS if self._lost is None else _BEREFT_S
        deadline = time.monotonic() + grace_s
        late = [worker.child for worker in self._workers if not worker.child.wait(remaining_s(deadline))]
        if late and self._lost is None:
            names = ", ".join(f"{child.name} (pid {child.pid})" for child in late)
            logger.warning("%s did not end in %g s and must be killed", names, grace_s)
        for child in late:
            child.kill()
        for child in late:
            child.end()
