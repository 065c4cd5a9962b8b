"""/v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hardpoint.front_end.server.protocol.models import ModelList
from hardpoint.front_end.server.routes.common import context_of, json_response

router = APIRouter()


@router.get("/v1/models", responses={200: {"model": ModelList}})
async def show_available_models(raw_request: Request) -> Response:
    """The names this server answers to."""
    return json_response(context_of(raw_request).model_list())


@router.get("/v1/models/{name:path}")
async def show_model(name: str, raw_request: Request) -> Response:
    """One of them."""
    context = context_of(raw_request)
    context.check_model(name)
    cards = context.model_list().data
    return json_response(next((card for card in cards if card.id == name), cards[0]))
