"""/v1/responses: create, fetch and cancel."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from hardpoint.front_end.server.protocol.base import ErrorResponse
from hardpoint.front_end.server.protocol.responses import ResponsesRequest, ResponsesResponse
from hardpoint.front_end.server.routes.common import context_of, generate, json_response, require_json
from hardpoint.front_end.server.streams import open_stream

router = APIRouter()
_ANSWERS: dict[int | str, dict[str, type]] = {
    200: {"model": ResponsesResponse},
    400: {"model": ErrorResponse},
    404: {"model": ErrorResponse},
}


@router.post("/v1/responses", dependencies=[Depends(require_json)], responses=_ANSWERS)
async def create_responses(request: ResponsesRequest, raw_request: Request) -> Response:
    """Create a response; in the background, answer before it is there."""
    service = raw_request.app.state.openai_serving_responses
    if not request.background:
        return await generate(service, request, raw_request)
    request = await context_of(raw_request).hooks.admit(request, raw_request)
    run = await service.prepare(request, raw_request)
    started = service.begin(run)
    if not request.stream:
        return json_response(started)
    return await _stream(raw_request, started.id, None)


@router.get("/v1/responses/{response_id}", responses=_ANSWERS)
async def retrieve_responses(
    response_id: str,
    raw_request: Request,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
    stream: bool = False,
) -> Response:
    """A response that is kept, or the events of one."""
    if stream:
        return await _stream(raw_request, response_id, starting_after)
    return json_response(raw_request.app.state.openai_serving_responses.get(response_id))


@router.post("/v1/responses/{response_id}/cancel", responses=_ANSWERS)
async def cancel_responses(response_id: str, raw_request: Request) -> Response:
    """End a response that is made in the background."""
    return json_response(await raw_request.app.state.openai_serving_responses.cancel(response_id))


async def _stream(raw_request: Request, response_id: str, starting_after: int | None) -> Response:
    events = await raw_request.app.state.openai_serving_responses.follow(response_id, starting_after)
    settings = context_of(raw_request).settings
    return await open_stream(raw_request, events, settings.sse_keep_alive_interval, settings.log_error_stack)
