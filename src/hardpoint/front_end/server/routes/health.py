"""Whether the server lives, what it is and how busy it is."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hardpoint import __version__
from hardpoint.errors import EngineDeadError
from hardpoint.front_end.server.errors import Failure

router = APIRouter()


@router.get("/health")
async def health(raw_request: Request) -> Response:
    """200 while the engine lives, 503 once it has ended."""
    engine = raw_request.app.state.engine_client
    if engine is None:
        return Response(status_code=200)
    try:
        await engine.check_health()
    except EngineDeadError as error:
        return Failure(503, "ServiceUnavailableError", f"the engine has ended: {error.what}").response()
    return Response(status_code=200)


@router.get("/ping")
@router.post("/ping")
async def ping(raw_request: Request) -> Response:
    """The same under SageMaker's name."""
    return await health(raw_request)


@router.get("/load")
async def server_load(raw_request: Request) -> dict[str, int]:
    """Requests in flight (counted with `--enable-server-load-tracking`)."""
    return {"server_load": raw_request.app.state.server_load_metrics}


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


@router.get("/kv_event_sources")
async def kv_event_sources(raw_request: Request) -> dict[str, Any]:
    """Where cache events are published, by data-parallel rank."""
    engine = raw_request.app.state.engine_client
    sources = engine.get_kv_event_sources() if engine is not None else {}
    return {
        str(rank): dataclasses.asdict(config) if dataclasses.is_dataclass(config) else config  # type: ignore[arg-type]
        for rank, config in sources.items()
    }
