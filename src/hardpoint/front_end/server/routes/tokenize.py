"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Discriminator, Tag
from starlette.responses import Response

from hardpoint.front_end.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
    TokenizerInfoResponse,
)
from hardpoint.front_end.server.routes.common import json_response, require_json

router = APIRouter()
info_router = APIRouter()


def _kind(body: Any) -> str:
    """A body with messages is a conversation; telling by this keeps the error list short."""
    has = "messages" in body if isinstance(body, dict) else hasattr(body, "messages")
    return "Chat" if has else "Text"


TokenizeRequest = Annotated[
    Annotated[TokenizeCompletionRequest, Tag("Text")] | Annotated[TokenizeChatRequest, Tag("Chat")],
    Discriminator(_kind),
]


@router.post("/tokenize", dependencies=[Depends(require_json)], responses={200: {"model": TokenizeResponse}})
async def tokenize(request: TokenizeRequest, raw_request: Request) -> Response:
    """Ids of a text or of a conversation."""
    return json_response(await raw_request.app.state.openai_serving_tokenization.tokenize(request))


@router.post("/detokenize", dependencies=[Depends(require_json)], responses={200: {"model": DetokenizeResponse}})
async def detokenize(request: DetokenizeRequest, raw_request: Request) -> Response:
    """Text of ids."""
    return json_response(await raw_request.app.state.openai_serving_tokenization.detokenize(request))


@info_router.get("/tokenizer_info", responses={200: {"model": TokenizerInfoResponse}})
async def tokenizer_info(raw_request: Request) -> Response:
    """The tokenizer's class and settings (`--enable-tokenizer-info-endpoint`)."""
    return json_response(raw_request.app.state.openai_serving_tokenization.info())
