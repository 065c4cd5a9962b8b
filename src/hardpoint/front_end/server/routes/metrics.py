"""/metrics, in Prometheus' text format."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from hardpoint.front_end.observability.prometheus import CONTENT_TYPE, exposition

router = APIRouter()


# A plain function: making the text runs in a thread, beside the streams.
@router.get("/metrics")
@router.get("/metrics/{rest:path}", include_in_schema=False)
def metrics(rest: str = "") -> Response:
    """Every metric of this process (of all server processes with PROMETHEUS_MULTIPROC_DIR)."""
    return Response(exposition(), headers={"content-type": CONTENT_TYPE})
