"""Coded errors: what went wrong, who caused it, how to mend it.

HardpointError
├── ConfigError          a flag, a config field, an environment variable   (also a ValueError)
├── RegistrationError    a plugin registering something it may not         (also a ValueError)
├── PluginError          a plugin that cannot be loaded or misbehaves
├── ModelFileError       a model folder or file that cannot be used
├── StartError           a process that cannot start (port taken, child died)
├── CodecError           a value that cannot cross a process line
├── EngineDeadError      the engine core is gone; every request ends with this
└── EngineGenerateError  one request failed inside the engine
VLLMValidationError      a request asks for something it cannot have       (a ValueError; HTTP 400)
AdmissionError           a queue limit is reached                          (HTTP 503)
"""

from __future__ import annotations

import re
from typing import Any

_ORIGIN = re.compile(r" \[from [^\]]*\]")


class HardpointError(Exception):
    """An error a user, a file or a plugin can cause."""

    def __init__(self, what: str, *, code: str = "error", origin: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.origin = origin
        self.fix = fix

    def __str__(self) -> str:
        parts = [self.what]
        if self.origin:
            parts.append(f"[from {self.origin}]")
        if self.fix:
            parts.append(f"Fix: {self.fix}")
        return " ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.code, self.origin, self.fix)


def reason_of(error: Exception) -> str:
    """What went wrong, without origin and fix: for an error that passes another on and adds its own."""
    return error.what if isinstance(error, HardpointError) else str(error)


def without_origin(text: str) -> str:
    """The text of an error, perhaps one that crossed a process line, without the place on this machine it names."""
    return _ORIGIN.sub("", text)


def _rebuild(kind: type[HardpointError], what: str, code: str, origin: str, fix: str) -> HardpointError:
    return kind(what, code=code, origin=origin, fix=fix)


class ConfigError(HardpointError, ValueError):
    """A flag, config field or environment variable has an impossible value."""


class RegistrationError(HardpointError, ValueError):
    """A registration that breaks the rules of its row."""


class PluginError(HardpointError):
    """A plugin that cannot be loaded, has the wrong type or raised."""


class ModelFileError(HardpointError):
    """A model folder or file that is missing, damaged or not a model."""


class StartError(HardpointError):
    """A process that cannot start."""


class CodecError(HardpointError):
    """A value that cannot cross a process line, or bytes that are not one of our messages."""


class EngineDeadError(HardpointError):
    """The engine core has ended; nothing can be generated any more."""

    def __init__(self, what: str = "The engine core has ended.", **parts: str) -> None:
        super().__init__(what, **parts)


class EngineGenerateError(HardpointError):
    """One request failed inside the engine; the others go on."""


class VLLMValidationError(ValueError):
    """A request parameter is not acceptable; becomes HTTP 400 naming the parameter."""

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class AdmissionError(Exception):
    """A queue limit is reached; becomes HTTP 503 with Retry-After.

    reason  `max_num_queued_reqs` or `max_num_queued_tokens`
    """

    def __init__(self, message: str, *, reason: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s
