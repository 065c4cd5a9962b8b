"""The worker inside the engine core: the default with one device."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hardpoint.contracts.executor import Executor
from hardpoint.contracts.worker import WorkerWrapperBase
from hardpoint.contracts.worker_calls import call_worker
from hardpoint.engine_core.executors.addresses import MeetingPoint
from hardpoint.types.schedule import AsyncModelRunnerOutput


class UniProcExecutor(Executor):
    """One worker, called directly; with async scheduling on a thread of its own, in the order of the calls.

    The kernels let go of the interpreter, so the engine core's thread plans and sends while the worker computes.
    """

    _thread: ThreadPoolExecutor | None = None

    def _init_executor(self) -> None:
        if self.scheduler_config.async_scheduling:
            # From the first call on: what a library keeps per thread, such as its own threads, is made once.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        meeting_point = MeetingPoint()
        try:
            self._start_worker(meeting_point.address)
        finally:
            meeting_point.release()

    def _start_worker(self, meeting_point: str, rank: int = 0, local_rank: int = 0) -> None:
        self.driver_worker = WorkerWrapperBase(rpc_rank=0)
        arguments = {
            "vllm_config": self.vllm_config,
            "local_rank": local_rank,
            "rank": rank,
            "distributed_init_method": meeting_point,
            "is_driver_worker": True,
        }
        self.collective_rpc("init_worker", args=([arguments],))
        self.collective_rpc("init_device")
        self.collective_rpc("load_model")

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Yes."""
        return True

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call the worker here or on its thread; with `timeout` in another one, which goes on past it."""

        def call() -> list[Any]:
            return [_finished(call_worker(self.driver_worker, method, args, kwargs, timeout))]

        if self._thread is not None:
            future = self._thread.submit(contextvars.copy_context().run, call)
            return future if non_block else future.result()
        return _done(call) if non_block else call()

    def check_health(self) -> None:
        """As long as we are here, so is the worker."""

    def shutdown(self) -> None:
        """End the worker, after the step that it is in."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
        self.driver_worker.shutdown()


def _done(call: Callable[[], list[Any]]) -> Future[list[Any]]:
    """A future of a call that has been made already."""
    future: Future[list[Any]] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


def _finished(result: Any) -> Any:
    return result.get_output() if isinstance(result, AsyncModelRunnerOutput) else result
