"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from hardpoint.front_end.server.protocol.base import ErrorResponse
from hardpoint.front_end.server.protocol.messages import (
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
    MessagesResponse,
)
from hardpoint.front_end.server.routes.common import context_of, generate, json_response, require_json

router = APIRouter()


@router.post(
    "/v1/messages",
    dependencies=[Depends(require_json)],
    responses={200: {"model": MessagesResponse}, 400: {"model": ErrorResponse}},
)
async def create_messages(request: MessagesRequest, raw_request: Request) -> Response:
    """Answer a conversation."""
    return await generate(raw_request.app.state.anthropic_serving_messages, request, raw_request)


@router.post(
    "/v1/messages/count_tokens",
    dependencies=[Depends(require_json)],
    responses={200: {"model": CountTokensResponse}, 400: {"model": ErrorResponse}},
)
async def count_tokens(request: CountTokensRequest, raw_request: Request) -> Response:
    """Count the tokens of a conversation."""
    request = await context_of(raw_request).hooks.admit(request, raw_request)
    return json_response(await raw_request.app.state.anthropic_serving_messages.count(request))
