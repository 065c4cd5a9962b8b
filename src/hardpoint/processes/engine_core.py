"""The engine core process: receives a configuration, loads the model, then steps until told to end.

One thread does everything: requests are read between two steps, so nothing in the engine core
needs a lock. A pipe wakes it for signals and for workers that end by themselves.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

import zmq

from hardpoint.config.resolve import settle_again
from hardpoint.config.sections import ParallelConfig
from hardpoint.config.wire import from_wire
from hardpoint.contracts.executor import Executor
from hardpoint.contracts.worker_calls import describe_error
from hardpoint.engine_core.step import EngineCore
from hardpoint.errors import CodecError, EngineDeadError
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role
from hardpoint.links.children import ParentLink
from hardpoint.links.codec import Decoder, Encoder, tagged
from hardpoint.links.sockets import bind_router
from hardpoint.log import init_logger
from hardpoint.processes.child import apply_environ, end_process, preload, report_failure, run_child
from hardpoint.types.finish import FinishReason
from hardpoint.types.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineCoreStart,
    Ready,
    UtilityCall,
    UtilityOutput,
)

logger = init_logger(__name__)
# How long to wait for a message when there is work but nothing could run, e.g. a grammar still compiles.
_STALLED_WAIT_MS = 2
# How long after a failed step a worker may be found to have ended.
_CAUSE_S = 1.0


class EngineCoreLoop:
    """Reads requests, steps, sends outputs, until `stop` or an error that no request can outlive."""

    def __init__(self, core: EngineCore, router: Any, drain_s: float, index: int = 0) -> None:
        self._core = core
        # Which replica this is, for who reads the outputs of several.
        self._index = index
        self._router = router
        self._drain_s = drain_s
        self._stop_at: float | None = None
        self._failure: str | None = None
        self._encoder = Encoder()
        self._requests = Decoder(EngineCoreRequest)
        self._aborts: Decoder[list[str]] = Decoder(list[str])
        self._calls = Decoder(UtilityCall)
        # Identities of the front ends.
        self._clients: set[bytes] = set()
        # Utility results that came later, on whatever thread made them.
        self._late: SimpleQueue[tuple[bytes, UtilityOutput]] = SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        # First frame -> what to do with the message.
        self._handlers: dict[bytes, Callable[[bytes, bytes], None]] = {
            EngineCoreRequestType.ADD.value: self._add,
            EngineCoreRequestType.ABORT.value: self._abort,
            EngineCoreRequestType.UTILITY.value: self._call,
            EngineCoreRequestType.WAKEUP.value: self._greet,
        }

    def stop(self) -> None:
        """End once idle, or when the drain time is over. Safe in a signal handler and from any thread."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._drain_s
        self._wake()

    def stop_on_sigterm(self) -> None:
        """Have SIGTERM call `stop`; from the main thread."""
        # A signal may come while zmq's poll is at work and not in the kernel: it interrupts nothing then, and
        # Python's handler waits for the poll to end. The wake-up descriptor is written to at once.
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda number, frame: self.stop())

    def fail(self, reason: str) -> None:
        """End with an error, e.g. since a worker has ended. Safe from any thread."""
        self._failure = reason
        self._wake()

    def say_last(self) -> None:
        """Tell the front ends that they have all outputs once they have read this."""
        for identity in self._clients:
            self._send(identity, EngineCoreOutputs(is_last=True))

    def run(self) -> None:
        """Loop until stopped; raise EngineDeadError or what a step raised."""
        wait_ms: int | None = None
        while not self._is_over():
            self._receive(wait_ms)
            self._check_workers()
            try:
                wait_ms = self._step() if self._core.has_work() else None
            except Exception:
                self._wait_for_cause()
                raise

    def _check_workers(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure, code="worker-died", fix="see the log above for the cause")

    def _wait_for_cause(self) -> None:
        """Raise EngineDeadError when a worker has ended: others that wait for it may be the first to complain."""
        if self._core.vllm_config.parallel_config.world_size == 1:
            return
        deadline = time.monotonic() + _CAUSE_S
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._check_workers()

    def _is_over(self) -> bool:
        if self._stop_at is None:
            return False
        return not self._core.has_work() or time.monotonic() >= self._stop_at

    def _step(self) -> int:
        """One step; returns how long to wait for messages before the next, in milliseconds."""
        outputs, executed = self._core.step()
        for client_index, batch in outputs.items():
            self._send(b"client-%d" % client_index, batch)
        return 0 if executed or outputs else _STALLED_WAIT_MS

    def _receive(self, wait_ms: int | None) -> None:
        """Take in every message that is there; wait for one up to `wait_ms` (None: without limit)."""
        if wait_ms != 0:
            self._poller.poll(wait_ms)
        self._clear_wake()
        self._send_late()
        while True:
            try:
                identity, kind, message = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                logger.warning("a message of the wrong shape arrived and is ignored")
                continue
            handler = self._handlers.get(kind)
            if handler is None:
                logger.warning("a message of unknown kind %r arrived and is ignored", kind)
            else:
                handler(identity, message)

    def _add(self, identity: bytes, message: bytes) -> None:
        try:
            request = self._requests.decode(message)
        except CodecError as error:
            logger.error("a request cannot be read and is ignored: %s", error)
            return
        try:
            self._core.add_request(request)
        except Exception as error:
            logger.warning("request %s is refused: %s", request.request_id, error)
            refusal = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=str(error))
            self._send(identity, EngineCoreOutputs(outputs=[refusal], finished_requests={request.request_id}))

    def _abort(self, identity: bytes, message: bytes) -> None:
        try:
            self._core.abort_requests(self._aborts.decode(message))
        except CodecError as error:
            logger.error("an abort cannot be read and is ignored: %s", error)

    def _greet(self, identity: bytes, message: bytes) -> None:
        """Answer, so that a front end knows that both directions are connected."""
        self._clients.add(identity)
        self._send(identity, EngineCoreOutputs())

    def _call(self, identity: bytes, message: bytes) -> None:
        try:
            call = self._calls.decode(message)
        except CodecError as error:
            logger.error("a call cannot be read: %s", error)
            return
        try:
            result = _utility(self._core, call.method)(*call.args, **call.kwargs)
        except Exception as error:
            self._answer(identity, _failed(call, error))
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda future: self._finish_late(identity, call, future))
        else:
            self._answer(identity, UtilityOutput(call.call_id, result=result))

    def _finish_late(self, identity: bytes, call: UtilityCall, future: Future[Any]) -> None:
        error = future.exception()
        answer = UtilityOutput(call.call_id, result=future.result()) if error is None else _failed(call, error)
        self._late.put((identity, answer))
        self._wake()

    def _send_late(self) -> None:
        try:
            while True:
                self._answer(*self._late.get_nowait())
        except Empty:
            return

    def _answer(self, identity: bytes, answer: UtilityOutput) -> None:
        try:
            answer.result = tagged(answer.result)
        except CodecError as error:
            kind, text = describe_error(error)
            answer = UtilityOutput(answer.call_id, failure_message=text, failure_type=kind)
        self._send(identity, EngineCoreOutputs(utility_output=answer))

    def _send(self, identity: bytes, outputs: EngineCoreOutputs) -> None:
        outputs.engine_index = self._index
        try:
            self._router.send_multipart([identity, self._encoder.encode(outputs)], copy=False)
        except zmq.ZMQError as error:
            logger.warning("%s is not connected any more: %s", identity.decode(), error)

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # Full of wake-ups already.

    def _clear_wake(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            return


def _utility(core: EngineCore, method: str) -> Callable[..., Any]:
    found = None if method.startswith("_") else getattr(core, method, None)
    if not callable(found):
        raise NotImplementedError(f"the engine core has no method {method!r}")
    return found


def _failed(call: UtilityCall, error: BaseException) -> UtilityOutput:
    logger.debug("call of %s failed", call.method, exc_info=error)
    kind, text = describe_error(error)
    return UtilityOutput(call.call_id, failure_message=text or kind, failure_type=kind)


def ready_message(core: EngineCore, index: int) -> Ready:
    """What the front end is told once requests can be served."""
    config = core.vllm_config
    blocks, block_tokens = config.cache_config.num_gpu_blocks or 0, config.cache_config.block_size or 0
    return Ready(
        engine_index=index,
        num_gpu_blocks=blocks,
        kv_cache_size_tokens=config.cache_config.kv_cache_size_tokens or 0,
        max_model_len=config.model_config.max_model_len or 0,
        block_size=block_tokens,
        supported_tasks=list(core.get_supported_tasks()),
        ledger=core.get_ledger(),
    )


def _serve(link: ParentLink) -> int:
    preload(link.options.preload)
    start = _starts.decode(link.channel.receive())
    apply_environ(start.environ)
    context = zmq.Context()
    router = bind_router(context, start.address)
    try:
        return _run_engine(link, start, router)
    finally:
        router.close()
        context.term()


def _run_engine(link: ParentLink, start: EngineCoreStart, router: Any) -> int:
    config = from_wire(start.config)
    _take_rank(config.parallel_config, link.index)
    # The platform's hooks run here again, as in vLLM, but before anything is built from the result.
    settle_again(config)
    executor_class = load_ref(start.executor_class) if start.executor_class else Executor.get_class(config)
    loop: EngineCoreLoop | None = None

    def worker_ended() -> None:
        if loop is not None:
            loop.fail(_what_ended(core.model_executor))

    core = EngineCore(config, executor_class, start.log_stats, worker_ended)
    try:
        loop = EngineCoreLoop(core, router, config.shutdown_timeout, link.index)
        loop.stop_on_sigterm()
        # What is there now stays: full collections need not look through modules and the model again and again.
        gc.freeze()
        link.send(ready_message(core, link.index))
        loop.run()
    except BaseException as error:
        # Before the clean-up, which may take its time: the front end must not wait for it.
        if loop is not None:
            loop.say_last()
        report_failure(link, error)
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        core.shutdown()
    return 0


def _take_rank(parallel: ParallelConfig, rank: int) -> None:
    """Make the configuration, which all replicas are sent, that of one."""
    if parallel.data_parallel_size > 1:
        parallel.data_parallel_rank = parallel.data_parallel_rank_local = parallel.data_parallel_index = rank


def _what_ended(executor: Executor) -> str:
    try:
        executor.check_health()
    except Exception as error:
        return getattr(error, "what", None) or str(error)
    return "a worker process has ended"


_starts = Decoder(EngineCoreStart)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one engine core until its front end lets go; return the exit status."""
    parser = argparse.ArgumentParser(prog="hardpoint engine core")
    parser.add_argument("--preload", action="append", default=[], help="module to import while waiting")
    return run_child(sys.argv[1:] if argv is None else argv, Role.ENGINE_CORE, "engine core", _serve, parser)


if __name__ == "__main__":
    end_process(main())
