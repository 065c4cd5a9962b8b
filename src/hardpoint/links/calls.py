"""Calls whose caller may be in another process: time limits, and errors as type and text."""

from __future__ import annotations

import builtins
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import hardpoint.errors
from hardpoint.errors import HardpointError
from hardpoint.log import init_logger
from hardpoint.types.messages import UtilityOutput

logger = init_logger(__name__)


class RemoteCallError(RuntimeError):
    """A call failed in another process with an error whose class does not exist here.

    kind  class name of the error there
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def call_with_limit(function: Callable[[], Any], timeout_s: float | None, what: str) -> Any:
    """Return `function()`; raise TimeoutError when it takes longer than `timeout_s`.

    Python cannot interrupt a call: past the limit it goes on in its own thread, unheard.
    Without a limit the function runs in the calling thread.
    """
    if timeout_s is None:
        return function()
    done = threading.Event()
    outcome: list[tuple[Any, BaseException | None]] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.append((context.run(function), None))
        except BaseException as error:
            outcome.append((None, error))
        done.set()

    threading.Thread(target=run, name=f"call {what}", daemon=True).start()
    if not done.wait(timeout_s):
        logger.warning(
            "%s did not end in %g s; its caller has been told, it goes on in the background", what, timeout_s
        )
        raise TimeoutError(f"{what} did not end in {timeout_s:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def failure(call_id: int, error: BaseException) -> UtilityOutput:
    """The answer to a call that raised."""
    text = str(error) or type(error).__name__
    return UtilityOutput(call_id, failure_message=text, failure_type=type(error).__name__)


def raise_failure(answer: UtilityOutput) -> None:
    """Raise the like of what the other process raised; nothing when the call succeeded.

    A built-in exception or one of ours comes back as itself, any other as RemoteCallError.
    """
    if answer.failure_message is None:
        return
    kind = answer.failure_type or "Exception"
    raise _rebuild(kind, answer.failure_message)


def _rebuild(kind: str, message: str) -> Exception:
    known = getattr(hardpoint.errors, kind, None) or getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        if issubclass(known, HardpointError):
            return known(message)
        try:
            error = known(message)
            # KeyError and the like quote their argument; the text is already the final one.
            return error if str(error) == message else RemoteCallError(kind, message)
        except TypeError:
            pass
    return RemoteCallError(kind, message)
