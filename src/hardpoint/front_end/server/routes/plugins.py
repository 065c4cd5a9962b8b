"""/plugins: the table of extension points and what every process did with it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hardpoint.front_end.server.plugin_report import report

router = APIRouter()


@router.get("/plugins")
async def show_plugins(raw_request: Request) -> Response:
    """Groups, registries, their entries and origins, and the ledger of all processes."""
    body = await report(raw_request.app.state.engine_client)
    return Response(body, media_type="application/json")
