"""Calls from the engine core to one worker process, over the pipe they share.

Several calls may be under way; the worker answers them in order. A worker that dies fails
every call that waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import msgspec

from hardpoint.contracts.worker_calls import call_worker, describe_error, rebuild_error
from hardpoint.errors import CodecError, EngineDeadError
from hardpoint.links.channel import Channel, ChannelClosed
from hardpoint.links.codec import Decoder, Encoder, tagged
from hardpoint.log import init_logger
from hardpoint.types.messages import UtilityOutput, WorkerCall

logger = init_logger(__name__)
# The worker keeps the limit itself; this is for its answer to arrive.
_ANSWER_GRACE_S = 2.0
_encoder = Encoder()
_calls = Decoder(WorkerCall)
_answers = Decoder(UtilityOutput)


def encode_call(
    method: str | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    call_id: int = 0,
    silent: bool = False,
) -> bytes:
    """Encode one call, e.g. once for all workers.

    Raises CodecError for an argument that cannot cross; a function crosses only with
    VLLM_ALLOW_INSECURE_SERIALIZATION=1.
    """
    name = method if isinstance(method, str) else tagged(method)
    arguments = [tagged(value) for value in args]
    named = {key: tagged(value) for key, value in (kwargs or {}).items()}
    return _encoder.encode(WorkerCall(call_id, name, arguments, named, timeout_s, silent))


class WorkerLink:
    """The engine core's end. Any thread may call.

    how_it_ended  says what became of the worker; asked once its end of the pipe is closed
    """

    def __init__(self, channel: Channel, name: str, how_it_ended: Callable[[], str] | None = None) -> None:
        self.name = name
        self._how_it_ended = how_it_ended or (lambda: f"{name} has ended")
        self._channel = channel
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._order = threading.Lock()
        self._lost: str | None = None
        threading.Thread(target=self._receive, name=f"answers of {name}", daemon=True).start()

    def submit(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        silent: bool = False,
    ) -> Future[Any]:
        """Send a call; the future holds its result, what it raised, or EngineDeadError.

        silent  the result is not wanted, only to know that there is one
        """
        future: Future[Any] = Future()
        call_id = next(self._ids)
        frame = encode_call(method, args, kwargs, timeout_s, call_id, silent)
        with self._order:
            if self._lost is not None:
                raise EngineDeadError(self._lost)
            self._waiting[call_id] = future
        try:
            self._channel.send(frame)
        except ChannelClosed:
            self._fail_all(self._how_it_ended())
        return future

    def call(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Call and wait.

        Raises what the worker raised (see `rebuild_error`), TimeoutError, or EngineDeadError
        when the worker ends meanwhile.
        """
        future = self.submit(method, args, kwargs, timeout_s)
        try:
            return future.result(None if timeout_s is None else timeout_s + _ANSWER_GRACE_S)
        except FutureTimeoutError:
            if future.done():
                raise
            raise TimeoutError(f"{self.name} did not answer {method!r} in {timeout_s:g} s") from None

    def close(self) -> None:
        """Close the pipe; the worker ends its loop, and what waits fails."""
        self._channel.close()

    def _receive(self) -> None:
        try:
            while True:
                self._settle(_answers.decode(self._channel.receive()))
        except ChannelClosed:
            self._fail_all(self._how_it_ended())
        except CodecError as error:
            self._fail_all(f"{self.name} sent something unreadable: {error}")

    def _settle(self, answer: UtilityOutput) -> None:
        with self._order:
            future = self._waiting.pop(answer.call_id, None)
        if future is None:
            return
        if answer.failure_message is None:
            future.set_result(answer.result)
        else:
            future.set_exception(rebuild_error(answer.failure_type, answer.failure_message, self.name))

    def _fail_all(self, reason: str) -> None:
        with self._order:
            self._lost = reason
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(EngineDeadError(reason))


def read_answer(answer: bytes, name: str) -> Any:
    """The result in an answer; raises the like of what the worker `name` raised."""
    output = _answers.decode(answer)
    if output.failure_message is not None:
        raise rebuild_error(output.failure_type, output.failure_message, name)
    return output.result


def serve_calls(channel: Channel, target: Any) -> None:
    """Answer calls on `target` until the other end closes the pipe (the worker's main loop)."""
    with contextlib.suppress(ChannelClosed):
        while True:
            channel.send(answer_call(channel.receive(), target))


def answer_call(frame: bytes, target: Any) -> bytes:
    """Make a call that `encode_call` has encoded, on `target`; returns the encoded result, or what it raised."""
    # Read on its own: a call that cannot be decoded still gets its answer.
    call_id = msgspec.msgpack.decode(msgspec.msgpack.decode(frame, type=list[msgspec.Raw])[0], type=int)
    try:
        call = _calls.decode(frame)
        result = call_worker(target, call.method, call.args, call.kwargs, call.timeout_s)
        return _encoder.encode(UtilityOutput(call_id, result=None if call.silent else tagged(result)))
    except Exception as error:
        logger.debug("a call failed", exc_info=True)
        kind, text = describe_error(error)
        return _encoder.encode(UtilityOutput(call_id, failure_message=text or kind, failure_type=kind))
