"""What several route modules need."""

from __future__ import annotations

import email.message
import re
from collections.abc import Iterable
from typing import Any, Protocol

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.responses import Response

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.serving.context import ServerContext
from hardpoint.front_end.server.serving.jobs import Job
from hardpoint.front_end.server.streams import open_stream, unless_disconnected

# How a JSON text has to write half of a surrogate pair; pairs match too.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def require_json(request: Request) -> None:
    """Refuse a body that is not declared as JSON, or has texts that no encoder takes."""
    header = email.message.Message()
    header["content-type"] = request.headers.get("content-type", "")
    if header.get_content_type() != "application/json":
        raise RequestValidationError(
            [
                {
                    "type": "content_type",
                    "loc": ("header", "Content-Type"),
                    "msg": "the header Content-Type must be application/json",
                }
            ]
        )
    if _SURROGATE.search(await request.body()):
        # Texts go many ways, and each would fail in another manner: prompt, schema, grammar, metadata.
        _refuse_half_pairs(await request.json())


def _refuse_half_pairs(body: Any) -> None:
    """Raise VLLMValidationError for the first text of a JSON value with half of a surrogate pair."""
    left: list[tuple[str, Any]] = [("", body)]
    while left:
        where, value = left.pop()
        inner: Iterable[tuple[Any, Any]] = ()
        texts = [value] if isinstance(value, str) else []
        if isinstance(value, dict):
            inner, texts = value.items(), list(value)
        elif isinstance(value, list):
            inner = enumerate(value)
        if not all(map(_is_whole, texts)):
            raise VLLMValidationError("a text of the request has half of a surrogate pair", parameter=where or None)
        left += [(f"{where}.{key}".lstrip("."), one) for key, one in inner if isinstance(one, str | dict | list)]


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def context_of(request: Request) -> ServerContext:
    """What the services of this server share."""
    return request.app.state.context


def json_response(body: BaseModel) -> Response:
    """A model as a JSON response."""
    return Response(body.model_dump_json(), media_type="application/json")


class GenerationService(Protocol):
    """A service whose answer comes whole or as a stream."""

    async def prepare(self, request: Any, http: Request) -> Job:
        """Check the request."""

    async def whole(self, request: Any, job: Job) -> Any:
        """Run it to its end."""

    def stream(self, request: Any, job: Job) -> Any:
        """Run it and yield events."""


async def generate(service: GenerationService, request: Any, http: Request) -> Response:
    """Answer a generation request; the engine's work ends when the client leaves."""
    settings = context_of(http).settings
    request = await context_of(http).hooks.admit(request, http)
    job = await service.prepare(request, http)
    if request.stream:
        events = service.stream(request, job)
        return await open_stream(http, events, settings.sse_keep_alive_interval, settings.log_error_stack)
    answer = await unless_disconnected(http, service.whole(request, job))
    http.state.request_metadata.final_usage_info = answer.usage.plain()
    return json_response(answer)
