"""The worker inside the engine core: the default with one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hardpoint.contracts.executor import Executor
from hardpoint.contracts.worker import WorkerWrapperBase
from hardpoint.contracts.worker_calls import call_worker
from hardpoint.engine_core.executors.addresses import free_tcp_address
from hardpoint.types.schedule import AsyncModelRunnerOutput


class UniProcExecutor(Executor):
    """One worker, called directly."""

    def _init_executor(self) -> None:
        self.driver_worker = WorkerWrapperBase(rpc_rank=0)
        arguments = {
            "vllm_config": self.vllm_config,
            "local_rank": 0,
            "rank": 0,
            "distributed_init_method": free_tcp_address(),
            "is_driver_worker": True,
        }
        self.driver_worker.init_worker([arguments])
        self.driver_worker.init_device()
        self.driver_worker.load_model()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call the worker here; with `timeout` in a thread, which goes on past it."""
        if not non_block:
            return [_finished(call_worker(self.driver_worker, method, args, kwargs, timeout))]
        future: Future[list[Any]] = Future()
        try:
            future.set_result([_finished(call_worker(self.driver_worker, method, args, kwargs, timeout))])
        except Exception as error:
            future.set_exception(error)
        return future

    def check_health(self) -> None:
        """As long as we are here, so is the worker."""

    def shutdown(self) -> None:
        """End the worker."""
        self.driver_worker.shutdown()


def _finished(result: Any) -> Any:
    return result.get_output() if isinstance(result, AsyncModelRunnerOutput) else result
