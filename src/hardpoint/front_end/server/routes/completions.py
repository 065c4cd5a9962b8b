"""/v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from hardpoint.front_end.server.protocol.base import ErrorResponse
from hardpoint.front_end.server.protocol.completions import CompletionRequest, CompletionResponse
from hardpoint.front_end.server.routes.common import generate, require_json

router = APIRouter()


@router.post(
    "/v1/completions",
    dependencies=[Depends(require_json)],
    responses={200: {"model": CompletionResponse}, 400: {"model": ErrorResponse}},
)
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """Continue one or several prompts."""
    return await generate(raw_request.app.state.openai_serving_completion, request, raw_request)
