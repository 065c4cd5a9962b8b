"""What executors share whose workers are in other processes: each call goes to all, in order, and they end together."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from hardpoint.contracts.executor import Executor, FailureCallback
from hardpoint.env import envs
from hardpoint.errors import EngineDeadError
from hardpoint.log import init_logger
from hardpoint.types.schedule import GrammarOutput, SchedulerOutput

logger = init_logger(__name__)
# A worker keeps a call's limit itself; this is for its answer to arrive.
_ANSWER_GRACE_S = 2.0


class RemoteExecutor(Executor):
    """Sends each call to `world_size` workers, which take calls in the order in which they come."""

    supports_pp = True

    def _init_executor(self) -> None:
        self._lock = threading.Lock()
        self._failure_callback: FailureCallback | None = None
        self._lost: str | None = None
        self._stopping = False
        # The rank whose answer counts: the first of the last pipeline stage.
        self._output_rank = self.parallel_config.world_size - self.parallel_config.tensor_parallel_size
        try:
            self._start_workers()
            self.collective_rpc("init_device")
            self.collective_rpc("load_model")
            self._have_met()
        except BaseException:
            self.shutdown()
            raise

    @abstractmethod
    def _start_workers(self) -> None:
        """Start all workers and wait until each is there; no device, no model yet."""

    def _have_met(self) -> None:
        """Hear that the ranks have found each other."""

    @abstractmethod
    def _send(
        self,
        rank: int,
        method: str | Callable[..., Any],
        timeout: float | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        silent: bool,
    ) -> Future[Any]:
        """Call one worker. `silent`: its result is not wanted, only to know that there is one."""

    @abstractmethod
    def _end_workers(self) -> None:
        """End all workers; called once, also when some did not start."""

    def _worker_ended(self, what: str) -> None:
        """Note that a worker has ended by itself. From any thread."""
        with self._lock:
            if self._stopping or self._lost is not None:
                return
            self._lost = what
            callback = self._failure_callback
        logger.error("%s", what)
        if callback is not None:
            callback()

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Yes: a worker takes its calls in order."""
        return True

    @property
    def step_timeout_s(self) -> float | None:
        """VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS."""
        return envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Have `callback` called when a worker ends by itself; at once if one has."""
        with self._lock:
            self._failure_callback = callback
            lost = self._lost
        if lost is not None:
            callback()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call every worker; see the contract."""
        futures = self._submit(method, timeout, args, kwargs)
        if non_block:
            return _gathered(futures)
        return _results(futures, method, None if timeout is None else timeout + _ANSWER_GRACE_S)

    def _submit(
        self,
        method: str | Callable[..., Any],
        timeout: float | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        only_from: int | None = None,
    ) -> list[Future[Any]]:
        """Call every worker. `only_from`: the one whose result is wanted; the others tell that they are done."""
        self.check_health()
        return [
            self._send(rank, method, timeout, args, kwargs, only_from not in (None, rank))
            for rank in range(self.parallel_config.world_size)
        ]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Run a step on every worker; TimeoutError past VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS."""
        return self._step("execute_model", scheduler_output, non_block)

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """Sample for the step that `execute_model` left open."""
        return self._step("sample_tokens", grammar_output, non_block)

    def _step(self, method: str, argument: Any, non_block: bool) -> Any:
        # The limit is kept here, not in the workers, where it would cost a thread per step.
        futures = self._submit(method, None, (argument,), only_from=self._output_rank)
        if non_block:
            return _first_error_or(futures, self._output_rank)
        return _results(futures, method, envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)[self._output_rank]

    def check_health(self) -> None:
        """EngineDeadError when a worker has ended."""
        if self._lost is not None:
            raise EngineDeadError(self._lost, code="worker-died")

    def shutdown(self) -> None:
        """End all workers; a second time does nothing."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        self._end_workers()


def _results(futures: list[Future[Any]], method: str | Callable[..., Any], timeout_s: float | None) -> list[Any]:
    """All results in order; the first error at once, even while other workers still wait for the failed one."""
    done, pending = wait(futures, timeout_s, FIRST_EXCEPTION)
    for future in futures:
        if future in done and future.exception() is not None:
            raise future.exception()  # type: ignore[misc]
    if pending:
        late = [rank for rank, future in enumerate(futures) if future in pending]
        raise TimeoutError(f"workers {late} did not answer {method!r} in {timeout_s:g} s")
    return [future.result() for future in futures]


def _first_error_or(futures: list[Future[Any]], index: int) -> Future[Any]:
    """A future of one result that also fails with any other's error: that one may never come then."""
    outcome: Future[Any] = Future()
    lock = threading.Lock()

    def settle(future: Future[Any]) -> None:
        with lock:
            error = future.exception()
            if outcome.done() or (error is None and future is not futures[index]):
                return
            if error is None:
                outcome.set_result(future.result())
            else:
                outcome.set_exception(error)

    for future in futures:
        future.add_done_callback(settle)
    return outcome


def _gathered(futures: list[Future[Any]]) -> Future[list[Any]]:
    """One future of all results; it fails with the first error."""
    gathered: Future[list[Any]] = Future()
    lock = threading.Lock()
    left = len(futures)

    def settle(future: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if gathered.done():
                return
            error = future.exception()
            if error is not None:
                gathered.set_exception(error)
            elif left == 0:
                gathered.set_result([each.result() for each in futures])

    for future in futures:
        future.add_done_callback(settle)
    return gathered
