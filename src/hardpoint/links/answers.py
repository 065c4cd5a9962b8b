"""Answers to requests and calls that did not reach the engine core."""

from __future__ import annotations

from typing import Any

import msgspec

from hardpoint.types.finish import FinishReason
from hardpoint.types.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    UtilityOutput,
)

_UTILITY_PLACE = EngineCoreOutputs.__struct_fields__.index("utility_output")


def refusal(kind: bytes, message: bytes, error: Exception) -> EngineCoreOutputs | None:
    """The answer to an encoded message that cannot be passed on; None where nobody waits for one."""
    try:
        subject = _first_field(message)
    except (msgspec.MsgspecError, IndexError):
        return None
    if kind == EngineCoreRequestType.ADD.value:
        return failed_request(str(subject), str(error))
    if kind == EngineCoreRequestType.UTILITY.value and isinstance(subject, int):
        return failed_call(subject, error)
    return None


def unreadable_answer(outputs: bytes, error: Exception) -> EngineCoreOutputs | None:
    """What to send in place of encoded outputs that hold the answer to a call; None when they do not."""
    try:
        subject = _first_field(msgspec.msgpack.decode(outputs, type=list[msgspec.Raw])[_UTILITY_PLACE])
    except (msgspec.MsgspecError, IndexError):
        return None
    return failed_call(subject, error) if isinstance(subject, int) else None


def failed_request(request_id: str, why: str) -> EngineCoreOutputs:
    """The end of a request with an error."""
    output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=why)
    return EngineCoreOutputs(outputs=[output], finished_requests={request_id})


def failed_call(call_id: int, error: Exception) -> EngineCoreOutputs:
    """The answer to a call that raised `error`."""
    answer = UtilityOutput(call_id, failure_message=str(error), failure_type=type(error).__name__)
    return EngineCoreOutputs(utility_output=answer)


def _first_field(message: Any) -> int | str:
    """A request's or a call's id, read on its own: the rest may be what cannot be read."""
    first = msgspec.msgpack.decode(message, type=list[msgspec.Raw])[0]
    return msgspec.msgpack.decode(first, type=int | str)
