"""/v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from hardpoint.front_end.server.protocol.base import ErrorResponse
from hardpoint.front_end.server.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from hardpoint.front_end.server.routes.common import generate, require_json

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    dependencies=[Depends(require_json)],
    responses={200: {"model": ChatCompletionResponse}, 400: {"model": ErrorResponse}},
)
async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """Answer a conversation."""
    return await generate(raw_request.app.state.openai_serving_chat, request, raw_request)
