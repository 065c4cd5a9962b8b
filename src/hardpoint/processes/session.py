"""A front end that a headless engine serves: what passes between the two, in either direction.

What a front end sends is read here, in a process without a model, before any of it reaches the engine
core: only plain data passes, only the calls that a front end needs, only aborts of its own requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import zmq

from hardpoint.errors import AdmissionError, CodecError, ConfigError, HardpointError
from hardpoint.links.answers import failed_call, failed_request, refusal, unreadable_answer
from hardpoint.links.codec import Decoder, Encoder
from hardpoint.links.tcp import MAX_LINK_BYTES
from hardpoint.log import init_logger
from hardpoint.types.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityCall,
)

logger = init_logger(__name__)
# Outputs taken before the other sockets have their turn.
_TURN = 256
# What a front end may call; the engine core has more methods, such as the one that ends it.
_CALLS = frozenset({
    "get_supported_tasks", "check_health", "get_ledger", "get_request_counts", "reset_prefix_cache", "reset_mm_cache",
    "reset_encoder_cache", "pause_scheduler", "resume_scheduler", "is_scheduler_paused", "is_sleeping", "sleep",
    "wake_up", "add_lora", "remove_lora", "pin_lora", "list_loras",
})  # fmt: skip
# These reach any method of a worker and its files: for front ends that have shown the secret.
_KEYED_CALLS = frozenset({"collective_rpc", "profile"})
# Called, one after the other, for a front end that has gone: it may have paused the engine. Once the second
# is answered, nothing that was made for that front end is on its way any more.
_LAST_CALLS = ("resume_scheduler", "get_request_counts")
# Those of a front end begin at 1.
_LAST_ID = 0

_encoder = Encoder()
_requests = Decoder(EngineCoreRequest, plain=True)
_aborts: Decoder[list[str]] = Decoder(list[str], plain=True)
_calls = Decoder(UtilityCall, plain=True)
_outputs = Decoder(EngineCoreOutputs, plain=True)


class Session:
    """One front end. One thread uses it.

    core      the socket to the engine core, which all front ends have one after the other
    identity  of the front end's connection
    sender    its name, for people
    keyed     whether it has shown the secret
    """

    def __init__(self, core: Any, identity: bytes, sender: str, keyed: bool) -> None:
        self.identity = identity
        self.sender = sender
        # When something was last heard of it, and when it was last told that we live.
        self.heard = self.beaten = time.monotonic()
        # Ids of requests that have not ended.
        self.running: set[str] = set()
        # Why it is over, once it is.
        self.ended: str | None = None
        self._core = core
        self._keyed = keyed
        # Calls that still have to be answered before the engine core has forgotten the front end.
        self._last_calls = list(_LAST_CALLS)

    def take(self, kind: bytes, message: bytes, draining: bool = False) -> EngineCoreOutputs | None:
        """Hand a message of the front end to the engine core; returns the answer when it is refused instead.

        draining  no new request is accepted
        """
        try:
            if kind == EngineCoreRequestType.ADD.value:
                self._add(_requests.decode(message), draining)
            elif kind == EngineCoreRequestType.ABORT.value:
                own = [request_id for request_id in _aborts.decode(message) if request_id in self.running]
                self.abort(own)
            elif kind == EngineCoreRequestType.UTILITY.value:
                self._check_call(_calls.decode(message))
                self._core.send_multipart([kind, message])
            elif kind == EngineCoreRequestType.WAKEUP.value:
                self._core.send_multipart([kind, b""])
        except (HardpointError, AdmissionError) as error:
            answer = refusal(kind, message, error)
            if answer is None:
                logger.warning("a message of the front end cannot be read and is ignored: %s", error)
            return answer
        return None

    def _add(self, request: EngineCoreRequest, draining: bool) -> None:
        if draining:
            raise AdmissionError("the engine is shutting down", reason="shutdown")
        request.client_index = 0
        self.running.add(request.request_id)
        self._core.send_multipart([EngineCoreRequestType.ADD.value, _encoder.encode(request)])

    def _check_call(self, call: UtilityCall) -> None:
        if call.method in _CALLS or (call.method in _KEYED_CALLS and self._keyed):
            return
        if call.method in _KEYED_CALLS:
            raise ConfigError(
                f"{call.method} is not available over a link without a secret",
                fix="set HARDPOINT_LINK_KEY for the engine and its front end",
            )
        raise ConfigError(f"{call.method[:100]!r} cannot be called from another machine")

    def abort(self, request_ids: list[str]) -> None:
        """End requests in the engine core."""
        self.running.difference_update(request_ids)
        self._core.send_multipart([EngineCoreRequestType.ABORT.value, _encoder.encode(request_ids)])

    def outputs(self) -> Iterator[bytes]:
        """What the engine core has made since, as it can be sent."""
        for _ in range(_TURN):
            try:
                data = self._core.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield from self._checked(data)

    def _checked(self, data: bytes) -> Iterator[bytes]:
        try:
            outputs = _outputs.decode(data)
        except CodecError as error:
            yield from self._unsendable(data, error)
            return
        if len(data) > MAX_LINK_BYTES:
            yield from self._too_long(outputs, f"{len(data)} bytes of output are more than the link carries at once")
            return
        self.running.difference_update(output.request_id for output in outputs.outputs if output.finished)
        yield data

    def _unsendable(self, data: bytes, error: CodecError) -> Iterator[bytes]:
        """The answer to a call that only processes of one machine could exchange."""
        answer = unreadable_answer(data, error)
        if answer is None:
            self.ended = f"what the engine made for it cannot be sent: {error.what}"
        else:
            yield _encoder.encode(answer)

    def _too_long(self, outputs: EngineCoreOutputs, why: str) -> Iterator[bytes]:
        if outputs.utility_output is not None:
            yield _encoder.encode(failed_call(outputs.utility_output.call_id, CodecError(why)))
        ids = [output.request_id for output in outputs.outputs]
        for request_id in ids:
            yield _encoder.encode(failed_request(request_id, why))
        self.abort(ids)

    def leave(self) -> int:
        """Have the engine core forget the front end; returns how many requests are aborted."""
        count = len(self.running)
        self.abort(list(self.running))
        self._call_last()
        return count

    def is_forgotten(self) -> bool:
        """Whether the engine core has nothing more for a front end that has left. To be asked until it has."""
        with suppress(zmq.Again):
            while self._last_calls:
                if _is_last(self._core.recv(zmq.NOBLOCK)):
                    self._last_calls.pop(0)
                    self._call_last()
        return not self._last_calls

    def _call_last(self) -> None:
        if self._last_calls:
            call = UtilityCall(_LAST_ID, self._last_calls[0], [], {})
            self._core.send_multipart([EngineCoreRequestType.UTILITY.value, _encoder.encode(call)])


def _is_last(data: bytes) -> bool:
    try:
        answer = _outputs.decode(data).utility_output
    except CodecError:
        return False
    return answer is not None and answer.call_id == _LAST_ID
