"""Talking to the engine core: from asyncio, from plain code, or within one process.

Three classes, one manner: requests and aborts go out, `get_output` brings what a step made,
`call_utility` calls a method of the engine core. When the engine core ends by itself,
everything that waits raises EngineDeadError.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq
import zmq.asyncio

from hardpoint.contracts.worker_calls import rebuild_error
from hardpoint.errors import EngineDeadError, StartError, VLLMValidationError
from hardpoint.front_end.engine_handle import EngineHandle
from hardpoint.front_end.turns import Turn
from hardpoint.links.codec import Decoder, Encoder, tagged
from hardpoint.links.sockets import connect_dealer
from hardpoint.log import init_logger
from hardpoint.types.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityCall,
    UtilityOutput,
)

logger = init_logger(__name__)
_CONNECT_TIMEOUT_MS = 10_000
# For an event loop in another thread to let go of the connection.
_LOOP_WAIT_S = 2.0
# The engine core keeps the limit of a call itself; this is for its answer to arrive.
_ANSWER_GRACE_S = 2.0
# An engine core that was killed may have sent outputs that are still on their way: until none came for so long.
_LAST_OUTPUTS_S = 0.25


class _Wire:
    """One connected DEALER socket, and how messages look on it."""

    def __init__(self, process: EngineHandle, client_index: int) -> None:
        self.context = zmq.Context()
        self.socket = connect_dealer(self.context, process.address, client_index)
        self._owner_pid = os.getpid()
        self._encoder = Encoder()
        self._decoder = Decoder(EngineCoreOutputs, plain=process.plain)
        self._ids = itertools.count(1)

    def greet(self) -> None:
        """Wait until messages pass in both directions."""
        self.socket.send_multipart([EngineCoreRequestType.WAKEUP.value, b""])
        if not self.socket.poll(_CONNECT_TIMEOUT_MS):
            raise StartError("the engine core does not answer on its socket", code="engine-connect")
        self.socket.recv()

    def frames(self, kind: EngineCoreRequestType, message: Any) -> list[bytes]:
        """The frames of one message.

        Raises VLLMValidationError for a value of a request that no message can hold.
        """
        try:
            return [kind.value, self._encoder.encode(message)]
        except UnicodeEncodeError:
            raise VLLMValidationError("a text of the request has half of a surrogate pair") from None
        except (OverflowError, RecursionError) as error:
            raise VLLMValidationError(f"a value of the request cannot be sent to the engine: {error}") from error

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UtilityCall:
        """A call with an id of its own. Raises CodecError for an argument that cannot cross."""
        named = {name: tagged(value) for name, value in kwargs.items()}
        return UtilityCall(next(self._ids), method, [tagged(value) for value in args], named)

    def decode(self, data: bytes) -> EngineCoreOutputs:
        """What the engine core sent."""
        return self._decoder.decode(data)

    def close(self) -> None:
        """Close the socket; a process forked from the owner leaves it alone."""
        if os.getpid() == self._owner_pid:
            self.context.destroy(linger=0)


def _release(process: EngineHandle, wire: _Wire, timeout_s: float | None = None) -> None:
    process.shutdown(timeout_s)
    wire.close()


def _open(process: EngineHandle, client_index: int) -> _Wire:
    wire = _Wire(process, client_index)
    try:
        wire.greet()
    except BaseException:
        wire.close()
        raise
    process.connected()
    return wire


class AsyncEngineCoreClient:
    """The engine core for a front end that runs on an event loop.

    Build it once `process.wait_ready()` has returned; use it from one event loop.

    outputs  where outputs go, for who reads those of several engine cores; a queue of its own unless given
    """

    def __init__(
        self,
        process: EngineHandle,
        client_index: int = 0,
        outputs: asyncio.Queue[EngineCoreOutputs | BaseException] | None = None,
    ) -> None:
        self.process = process
        self.client_index = client_index
        self._wire = _open(process, client_index)
        self._finalizer = weakref.finalize(self, _release, process, self._wire)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._outputs: asyncio.Queue[EngineCoreOutputs | BaseException] = outputs or asyncio.Queue()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_read = 0
        # Whether the engine core has failed and sent its last outputs.
        self._has_last = False
        # Why it has ended, while its last outputs are awaited.
        self._death: EngineDeadError | None = None
        process.on_death(self._died)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine core has ended; None while it runs."""
        return self.process.error

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Send one request."""
        request.client_index = self.client_index
        await self._send(EngineCoreRequestType.ADD, request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Stop requests; after a death there is nothing left to stop."""
        if request_ids and self.dead_error is None:
            await self._send(EngineCoreRequestType.ABORT, request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for what the next step made. Raises EngineDeadError."""
        self.start()
        outputs = await self._outputs.get()
        if isinstance(outputs, BaseException):
            raise outputs
        return outputs

    async def call_utility_async(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the engine core and return its result.

        Raises the like of what it raised, TimeoutError past `timeout_s`, EngineDeadError.
        """
        call = self._wire.call(method, args, kwargs)
        self.start()
        assert self._loop is not None
        future = self._loop.create_future()
        self._calls[call.call_id] = future
        try:
            await self._send(EngineCoreRequestType.UTILITY, call)
            return await asyncio.wait_for(future, None if timeout_s is None else timeout_s + _ANSWER_GRACE_S)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"{method} was not answered in {timeout_s:g} s") from None
        finally:
            self._calls.pop(call.call_id, None)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the engine core and close the connection; a second time does nothing."""
        if not self._finalizer.detach():
            return
        self.process.shutdown(timeout_s)
        self._on_loop(self._let_go)
        self._wire.close()

    def _on_loop(self, action: Callable[[], None]) -> None:
        """Run `action` where the event loop cannot run at the same time."""
        loop = self._loop
        if loop is None:
            return
        if not loop.is_running() or _is_in(loop):
            action()
            return
        done = threading.Event()
        loop.call_soon_threadsafe(action)
        loop.call_soon_threadsafe(done.set)
        done.wait(_LOOP_WAIT_S)

    def _let_go(self) -> None:
        """Leave the event loop: it would otherwise watch a descriptor that is somebody else's soon."""
        assert self._reader is not None
        assert self.process.error is not None
        if self._loop is not None and not self._loop.is_closed():
            self._reader.cancel()
            self._fail(self.process.error)
        self._socket.close(linger=0)

    async def _send(self, kind: EngineCoreRequestType, message: Any) -> None:
        self.process.check()
        self.start()
        await self._socket.send_multipart(self._wire.frames(kind, message))

    def start(self) -> None:
        """Bind to the running event loop and begin to read, once."""
        if self._reader is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._socket = zmq.asyncio.Socket.from_socket(self._wire.socket)
        self._reader = asyncio.create_task(self._read(), name="engine core outputs")

    async def _read(self) -> None:
        turn = Turn()
        try:
            while True:
                outputs = self._wire.decode(await self._socket.recv())
                self._num_read += 1
                if outputs.is_last:
                    self._has_last = True
                    if self._death is not None:
                        self._fail(self._death)
                elif outputs.utility_output is None:
                    self._outputs.put_nowait(outputs)
                else:
                    self._settle(outputs.utility_output)
                await turn.over()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("outputs of the engine core cannot be read")
            self._fail(EngineDeadError(f"outputs of the engine core cannot be read: {error}", code="engine-link"))

    def _settle(self, answer: UtilityOutput) -> None:
        future = self._calls.get(answer.call_id)
        if future is None or future.done():
            return
        if answer.failure_message is None:
            future.set_result(answer.result)
        else:
            future.set_exception(rebuild_error(answer.failure_type, answer.failure_message))

    def _died(self, error: EngineDeadError) -> None:
        """Called from the thread that watches the engine core."""
        if self._loop is None or self._loop.is_closed():
            return  # Nobody waits; `process.check` tells whoever comes.
        self._loop.call_soon_threadsafe(self._fail_soon, error)

    def _fail_soon(self, error: EngineDeadError) -> None:
        """Fail once the last outputs are read: those before the engine core's last word, or before a silence."""
        self._death = error
        if self._has_last:
            self._fail(error)
        else:
            self._await_silence(self._num_read)

    def _await_silence(self, seen: int) -> None:
        assert self._loop is not None
        loop = self._loop

        def judge(is_sure: bool = False) -> None:
            if self._has_last or self._socket.closed:
                return  # `_read` or `_let_go` has failed what waits.
            if self._num_read != seen or self._wire.socket.poll(0):
                self._await_silence(self._num_read)
            elif is_sure:
                assert self._death is not None
                self._fail(self._death)
            else:
                # What was taken from the socket in this turn is read by `_read` in the next.
                loop.call_soon(judge, True)

        loop.call_later(_LAST_OUTPUTS_S, judge)

    def _fail(self, error: EngineDeadError) -> None:
        self._outputs.put_nowait(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)


def _is_in(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class SyncClient(Protocol):
    """What LLMEngine needs of an engine core."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send one request."""

    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop requests."""

    def get_output(self) -> EngineCoreOutputs:
        """What the next step made."""

    def call_utility(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the engine core."""

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the engine core."""


class SyncEngineCoreClient:
    """The engine core in its own process, for plain code: calls block."""

    def __init__(self, process: EngineHandle) -> None:
        self.process = process
        self._wire = _open(process, 0)
        self._wake_read, self._wake_write = os.pipe()
        self._finalizer = weakref.finalize(self, _release_sync, process, self._wire, self._wake_read, self._wake_write)
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._has_last = False
        self._poller = zmq.Poller()
        self._poller.register(self._wire.socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        process.on_death(self._died)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send one request."""
        self._send(EngineCoreRequestType.ADD, request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop requests; after a death there is nothing left to stop."""
        if request_ids and self.process.error is None:
            self._send(EngineCoreRequestType.ABORT, request_ids)

    def get_output(self) -> EngineCoreOutputs:
        """Wait for what the next step made. Raises EngineDeadError."""
        while not self._outputs:
            outputs = self._receive(None)
            if outputs is not None and outputs.utility_output is None:
                return outputs
        return self._outputs.popleft()

    def call_utility(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the engine core and return its result.

        Raises the like of what it raised, TimeoutError past `timeout_s`, EngineDeadError.
        """
        call = self._wire.call(method, args, kwargs)
        self._send(EngineCoreRequestType.UTILITY, call)
        limit = None if timeout_s is None else timeout_s + _ANSWER_GRACE_S
        while True:
            outputs = self._receive(limit)
            if outputs is None:
                raise TimeoutError(f"{method} was not answered in {timeout_s:g} s")
            answer = outputs.utility_output
            if answer is None:
                self._outputs.append(outputs)
            elif answer.call_id == call.call_id:
                if answer.failure_message is not None:
                    raise rebuild_error(answer.failure_type, answer.failure_message)
                return answer.result

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the engine core and close the connection; a second time does nothing."""
        if self._finalizer.detach():
            _release_sync(self.process, self._wire, self._wake_read, self._wake_write, timeout_s)

    def _send(self, kind: EngineCoreRequestType, message: Any) -> None:
        self.process.check()
        self._wire.socket.send_multipart(self._wire.frames(kind, message))

    def _receive(self, timeout_s: float | None) -> EngineCoreOutputs | None:
        if self.process.error is not None:
            return self._receive_last()
        ready = dict(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
        if self._wire.socket in ready:
            outputs = self._wire.decode(self._wire.socket.recv())
            if not outputs.is_last:
                return outputs
            self._has_last = True
            return self._receive(timeout_s)  # Why it has failed comes another way.
        return None if self.process.error is None else self._receive_last()

    def _receive_last(self) -> EngineCoreOutputs:
        """What the engine core sent before it ended; raises EngineDeadError once there is no more."""
        sock = self._wire.socket
        if not self._has_last and not sock.closed and sock.poll(int(_LAST_OUTPUTS_S * 1000)):
            outputs = self._wire.decode(sock.recv())
            self._has_last = outputs.is_last
            if not outputs.is_last:
                return outputs
        self.process.check()
        raise AssertionError("the engine core has not ended")

    def _died(self, error: EngineDeadError) -> None:
        os.write(self._wake_write, b"\0")


def _release_sync(
    process: EngineHandle, wire: _Wire, wake_read: int, wake_write: int, timeout_s: float | None = None
) -> None:
    _release(process, wire, timeout_s)
    if os.getpid() == process.owner_pid:
        os.close(wake_read)
        os.close(wake_write)


class InProcessClient:
    """The engine core in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0): a step runs when asked for.

    make_core  builds the engine core; it has the methods `add_request`, `abort_requests`, `step`, `shutdown`
    """

    def __init__(self, make_core: Callable[[], Any]) -> None:
        self._core = make_core()
        self._finalizer = weakref.finalize(self, self._core.shutdown)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Give the engine core one request."""
        self._core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop requests."""
        if request_ids:
            self._core.abort_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        """Run one step and return what it made.

        Nobody asks for another one after the last request, so its end is passed on to the worker here.
        """
        outputs, _ = self._core.step()
        while self._core.has_work() and not self._core.has_unfinished_requests():
            self._core.step()
        return outputs.get(0) or EngineCoreOutputs()

    def call_utility(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the engine core; it keeps a time limit itself where it has one."""
        return getattr(self._core, method)(*args, **kwargs)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the engine core; a second time does nothing."""
        self._finalizer()
