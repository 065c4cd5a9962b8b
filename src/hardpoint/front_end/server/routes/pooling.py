"""/v1/embeddings, /pooling, /classify, /score and /rerank, as far as the model can."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from hardpoint.front_end.server.protocol.base import ErrorResponse
from hardpoint.front_end.server.protocol.pooling import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from hardpoint.front_end.server.routes.common import context_of, json_response, require_json
from hardpoint.front_end.server.streams import unless_disconnected
from hardpoint.types.tasks import POOLING_TASKS

EMBEDDINGS = ("/v1/embeddings",)
POOLING = ("/pooling",)
CLASSIFY = ("/classify",)
SCORE = ("/score", "/v1/score")
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
PATHS = (*EMBEDDINGS, *POOLING, *CLASSIFY, *SCORE, *RERANK)


async def _answer(body: Any, http: Request, handle: Callable[[Any, Request], Awaitable[Any]]) -> Response:
    """Answer a request; the engine's work ends when the client leaves."""
    body = await context_of(http).hooks.admit(body, http)
    answer: Any = await unless_disconnected(http, handle(body, http))  # type: ignore[arg-type]
    if isinstance(answer, Response):
        return answer
    usage = getattr(answer, "usage", None)
    if usage is not None:
        http.state.request_metadata.final_usage_info = usage
    return json_response(answer)


async def create_embedding(request: EmbeddingRequest, raw_request: Request) -> Response:
    """Embed texts, ids or conversations."""
    return await _answer(request, raw_request, raw_request.app.state.serving_pooling.embeddings)


async def create_pooling(request: PoolingRequest, raw_request: Request) -> Response:
    """Pool by a task, or let the model's IO processor answer."""
    return await _answer(request, raw_request, raw_request.app.state.serving_pooling.pooling)


async def create_classify(request: ClassificationRequest, raw_request: Request) -> Response:
    """Classify texts, ids or conversations."""
    return await _answer(request, raw_request, raw_request.app.state.serving_pooling.classify)


async def create_score(request: ScoreRequest, raw_request: Request) -> Response:
    """Compare texts."""
    return await _answer(request, raw_request, raw_request.app.state.serving_pooling.score)


async def do_rerank(request: RerankRequest, raw_request: Request) -> Response:
    """Order documents by a query."""
    return await _answer(request, raw_request, raw_request.app.state.serving_pooling.rerank)


def router_for(tasks: Sequence[str]) -> APIRouter:
    """The routes that a model with these tasks can answer."""
    router = APIRouter()
    can_compare = {"embed", "token_embed", "classify"} & set(tasks)
    rows: tuple[tuple[Any, tuple[str, ...], Any, Any], ...] = (
        (set(tasks) & {"embed"}, EMBEDDINGS, create_embedding, EmbeddingResponse),
        (set(tasks) & set(POOLING_TASKS), POOLING, create_pooling, PoolingResponse),
        (set(tasks) & {"classify"}, CLASSIFY, create_classify, ClassificationResponse),
        (can_compare, SCORE, create_score, ScoreResponse),
        (can_compare, RERANK, do_rerank, RerankResponse),
    )
    for possible, paths, endpoint, model in rows:
        for path in paths if possible else ():
            router.add_api_route(
                path,
                endpoint,
                methods=["POST"],
                dependencies=[Depends(require_json)],
                responses={200: {"model": model}, 400: {"model": ErrorResponse}},
            )
    return router
