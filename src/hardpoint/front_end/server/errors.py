"""Every refusal and failure as OpenAI's error body, without internals in the text."""

from __future__ import annotations

import http
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import msgspec
import pydantic
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from hardpoint.errors import AdmissionError, EngineDeadError, EngineGenerateError, VLLMValidationError
from hardpoint.log import init_logger

logger = init_logger(__name__)

MAX_LISTED_PROBLEMS = 10
_MAX_MESSAGE_CHARS = 4000

_ADDRESS = re.compile(r"\s*\bat 0x[0-9a-fA-F]+|0x[0-9a-fA-F]{8,}")
_ALTERNATIVE = re.compile(r"^[A-Z]\w*$|\[")
_PLAIN = ("str", "int", "float", "bool")
# What is wrong with a body as a whole.
_OF_THE_BODY = {
    "missing": "the request has no body",
    "model_attributes_type": "the body must be a JSON object",
    "dict_type": "the body must be a JSON object",
}
_UNREADABLE_BODY = "There was an error parsing the body"  # FastAPI's
_UNREADABLE = "the body is not valid JSON: it is no UTF-8 text, or nested too deeply"
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):.*", re.DOTALL)
# An absolute path of two parts or more; a URL's path follows a word character and is left alone, as is a place in a
# schema (#/properties/a), and a route of ours.
_PATH = re.compile(r"(?<![\w/.:#])/(?!v\d/)(?:[\w.@+~-]+/)+[\w.@+~-]*|\b[A-Za-z]:\\[^\s'\"]+")


_MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A refusal decided by the server itself; its message is shown as it is."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.failure = Failure(status, kind, message, param, dict(headers or {}))


class ClientLeft(Exception):
    """The client closed the connection before its answer was ready."""


@dataclass
class Failure:
    """What a client is told: HTTP status, error type, message, offending parameter."""

    status: int
    kind: str
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        # A message may repeat a client's lone surrogate, which no encoder takes.
        message = self.message.encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.status}}

    def messages_body(self) -> dict[str, Any]:
        """Anthropic's error object."""
        kind = _MESSAGES_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        message = self.body()["error"]["message"]
        # There is no place for the parameter but the text.
        if self.param is not None and self.status < 500 and self.param not in message:
            message = f"{self.param}: {message}"
        return {"type": "error", "error": {"type": kind, "message": message}}

    def response(self, path: str = "") -> Response:
        """The same as a JSON response, in the shape of the API that `path` belongs to."""
        body = self.messages_body() if path.startswith("/v1/messages") else self.body()
        return Response(msgspec.json.encode(body), self.status, self.headers, media_type="application/json")


def not_found(message: str, param: str | None = None) -> ApiError:
    """A 404 for a thing named in the request (a model, an adapter), not for a route."""
    return ApiError(message, status=404, kind="NotFoundError", param=param)


def not_implemented(message: str, param: str | None = None) -> ApiError:
    """A 501: the route is here, this server cannot do it."""
    return ApiError(message, status=501, kind="NotImplementedError", param=param)


def sanitise(message: str) -> str:
    """Drop memory addresses, tracebacks and file paths, and bound the length."""
    message = _TRACEBACK.sub("", message)
    message = _ADDRESS.sub("", message)
    message = _PATH.sub("<path>", message)
    message = message.strip()
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + "..."


def _internal(error: Exception) -> Failure:
    text = sanitise(str(error)) or type(error).__name__
    if isinstance(error, EngineGenerateError) and error.code == "request-timeout":
        return Failure(504, "Gateway Timeout", text)
    return Failure(500, "InternalServerError", text)


def _bad_request(error: Exception) -> Failure:
    param = getattr(error, "parameter", None)
    return Failure(400, "BadRequestError", sanitise(str(error)) or type(error).__name__, param)


def _admission(error: Exception) -> Failure:
    assert isinstance(error, AdmissionError)
    return Failure(503, "Service Unavailable", sanitise(str(error)), headers={"Retry-After": str(error.retry_after_s)})


def _http(error: Exception) -> Failure:
    assert isinstance(error, HTTPException)
    try:
        phrase = http.HTTPStatus(error.status_code).phrase
    except ValueError:
        phrase = "Error"
    detail = error.detail if isinstance(error.detail, str) else msgspec.json.encode(error.detail).decode()
    detail = _UNREADABLE if detail == _UNREADABLE_BODY else detail
    return Failure(error.status_code, phrase, sanitise(detail) or phrase, headers=dict(error.headers or {}))


def _dotted(location: Sequence[Any]) -> str | None:
    """`("body", "messages", 0, "role")` -> `messages.0.role`."""
    parts = [str(part) for part in location if part not in ("body", "query", "path", "header")]
    # Pydantic says which kind of several it tried: a class, or a type in brackets.
    last = len(parts) - 1
    parts = [part for i, part in enumerate(parts) if not (_ALTERNATIVE.search(part) or (i == last and part in _PLAIN))]
    return ".".join(parts)[:200] or None


def problems_of(error: RequestValidationError | pydantic.ValidationError) -> list[tuple[str | None, str]]:
    """What a body was refused for: where, as a dotted path, and the reason; of several kinds of value all."""
    found: dict[str | None, list[str]] = {}
    for problem in error.errors():
        cause = (problem.get("ctx") or {}).get("error")
        where = getattr(cause, "parameter", None) or _dotted(problem.get("loc", ()))
        # A validator's own words are enough: pydantic puts "Value error, " before them.
        reason = str(cause) if isinstance(cause, ValueError) else str(problem.get("msg", "invalid"))
        if where is None:
            reason = _OF_THE_BODY.get(str(problem.get("type")), reason)
        if reason not in found.setdefault(where, []):
            found[where].append(reason)
    return [(where, " or: ".join(reasons)) for where, reasons in found.items()]


def line_of(where: str | None, reason: str) -> str:
    """A problem with its place, which a reason may begin with."""
    return reason if not where or reason.startswith(f"{where} ") else f"{where}: {reason}"


def _validation(error: Exception) -> Failure:
    assert isinstance(error, RequestValidationError | pydantic.ValidationError)
    raw, problems = list(error.errors()), problems_of(error)
    lines = [line_of(where, reason) for where, reason in problems[:MAX_LISTED_PROBLEMS]]
    param = next((where for where, _ in problems[:MAX_LISTED_PROBLEMS] if where), None)
    if len(problems) > MAX_LISTED_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_LISTED_PROBLEMS} more")
    if raw and raw[0].get("type") == "json_invalid":
        reason = raw[0].get("ctx", {}).get("error", "")
        return Failure(400, "Bad Request", sanitise(f"the body is not valid JSON: {reason}"))
    return Failure(400, "Bad Request", sanitise("; ".join(lines)) or "the request is not valid", param)


# First match wins, so a subclass stands before its base.
_RULES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], Callable[[Exception], Failure]], ...] = (
    ((RequestValidationError, pydantic.ValidationError), _validation),
    (HTTPException, _http),
    (AdmissionError, _admission),
    (VLLMValidationError, _bad_request),
    ((EngineDeadError, EngineGenerateError), _internal),
    (NotImplementedError, lambda e: Failure(501, "NotImplementedError", sanitise(str(e)) or "not implemented")),
    (jinja2.TemplateError, _bad_request),
    (RecursionError, lambda _: Failure(400, "BadRequestError", "the request is nested too deeply")),
    (
        UnicodeEncodeError,
        lambda _: Failure(400, "BadRequestError", "a text of the request has half of a surrogate pair"),
    ),
    ((ValueError, TypeError, OverflowError), _bad_request),
)


def failure_of(error: Exception) -> Failure:
    """What a client is told about `error`; anything unknown is a 500."""
    if isinstance(error, ApiError):
        return error.failure
    for kinds, make in _RULES:
        if isinstance(error, kinds):
            return make(error)
    return _internal(error)


def report(error: Exception, failure: Failure, stack: bool) -> None:
    """Log a failure: server faults as errors, refusals at DEBUG, with the stack where it helps.

    That the engine has ended was logged when it did, once for all requests.
    """
    ours = failure.status >= 500 and failure.status not in (501, 503) and not isinstance(error, EngineDeadError)
    # A TypeError answered as 400 may be a slip of ours: keep its stack.
    with_stack = stack or ours or type(error) is TypeError
    level = "error" if ours else "debug"
    getattr(logger, level)(
        "%d %s: %s", failure.status, failure.kind, failure.message, exc_info=error if with_stack else None
    )


def route_path(scope: Scope) -> str:
    """The path the router matches: without the root path a proxy adds."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :] or "/"
    return path


def install_error_handlers(app: FastAPI, log_error_stack: bool) -> None:
    """Answer every exception a route or the router raises in OpenAI's shape.

    What no rule names passes on to the guard middleware, which answers 500.
    """

    async def handle(request: Request, error: Exception) -> Response:
        failure = failure_of(error)
        report(error, failure, log_error_stack)
        return failure.response(route_path(request.scope))

    async def nobody_listens(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(ClientLeft, nobody_listens)
    app.add_exception_handler(ApiError, handle)
    for kinds, _ in _RULES:
        for kind in kinds if isinstance(kinds, tuple) else (kinds,):
            app.add_exception_handler(kind, handle)
