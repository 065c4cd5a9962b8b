"""Calling a method of a worker: by name or function, with a time limit, and with errors that can travel."""

from __future__ import annotations

import builtins
import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import hardpoint.errors
from hardpoint.errors import HardpointError, VLLMValidationError


class RemoteCallError(HardpointError):
    """A method raised in another process; `what` holds the class name and the text."""

    def __init__(self, what: str, *, code: str = "remote-call", origin: str = "", fix: str = "") -> None:
        super().__init__(what, code=code, origin=origin, fix=fix)


def describe_error(error: BaseException) -> tuple[str, str]:
    """(class name, text) of an error: what of it can cross a process line."""
    return type(error).__name__, str(error)


def rebuild_error(failure_type: str | None, text: str, origin: str = "") -> Exception:
    """The like of an error raised elsewhere: the same class for built-in ones and ours, else `RemoteCallError`."""
    ours = getattr(hardpoint.errors, failure_type or "", None)
    if isinstance(ours, type) and issubclass(ours, HardpointError | VLLMValidationError):
        return ours(text)
    kind = getattr(builtins, failure_type or "", None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _LOOP_ENDS):
        with suppress(TypeError):  # Some need more than a text, e.g. UnicodeDecodeError.
            return kind(text)
    return RemoteCallError(f"{failure_type or 'error'}: {text}", origin=origin)


# Raised in a generator or a coroutine they would mean something else.
_LOOP_ENDS = (StopIteration, StopAsyncIteration)


def call_worker(
    worker: Any,
    method: str | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """Call `method` of `worker`, or the function `method` with the worker as first argument.

    timeout  seconds, None = no limit
    Raises NotImplementedError for an unknown name, TypeError for a method that is neither a name nor
    callable, TimeoutError past the limit (the call itself goes on in its thread), and whatever the method raises.
    """
    target = _resolve(worker, method)
    keywords = dict(kwargs or {})
    if timeout is None:
        return target(*args, **keywords)
    return _call_in_thread(lambda: target(*args, **keywords), timeout, _name_of(method))


def _resolve(worker: Any, method: str | Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(method, str):
        found = None if method.startswith("__") else getattr(worker, method, None)
        if not callable(found):
            raise NotImplementedError(f"Method {method!r} is not implemented.")
        return found
    if not callable(method):
        raise TypeError(f"method must be a name or a callable, got {type(method).__name__}")
    function = method
    subject = getattr(worker, "worker", None) or worker
    return lambda *args, **kwargs: function(subject, *args, **kwargs)


def _name_of(method: str | Callable[..., Any]) -> str:
    return method if isinstance(method, str) else getattr(method, "__name__", repr(method))


def _call_in_thread(call: Callable[[], Any], timeout: float, name: str) -> Any:
    outcome: list[tuple[bool, Any]] = []
    done = threading.Event()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.append((True, context.run(call)))
        except BaseException as error:
            outcome.append((False, error))
        done.set()

    # A daemon: a method that never ends must not keep the process from ending.
    threading.Thread(target=run, name=f"worker call {name}", daemon=True).start()
    if not done.wait(timeout):
        raise TimeoutError(f"worker method {name!r} did not finish within {timeout:g} s; it goes on in the background")
    worked, value = outcome[0]
    if worked:
        return value
    raise value
