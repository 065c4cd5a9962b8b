"""Routes of the API that this server's model cannot answer: 501 with what it can do, instead of 404."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hardpoint.front_end.server.errors import not_implemented
from hardpoint.front_end.server.routes.common import context_of
from hardpoint.front_end.server.routes.pooling import PATHS as POOLING_PATHS

GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")


def router_for(tasks: Sequence[str], present: Iterable[str]) -> APIRouter:
    """A refusal for every model route that is not among `present`; none of them is in the OpenAPI document."""
    router = APIRouter()
    there = set(present)
    for path in (*GENERATION_PATHS, *POOLING_PATHS):
        if path not in there:
            router.add_api_route(path, _refusal(path, tasks), methods=["POST"], include_in_schema=False)
    return router


def _refusal(path: str, tasks: Sequence[str]) -> Any:
    async def refuse(raw_request: Request) -> Response:
        model = context_of(raw_request).model_name
        able = ", ".join(tasks) or "nothing"
        hint = "; start the server with --runner pooling to make it embed" if path in POOLING_PATHS and (
            "generate" in tasks
        ) else ""  # fmt: skip
        raise not_implemented(f"The model `{model}` cannot answer {path}: it supports {able}{hint}")

    return refuse
