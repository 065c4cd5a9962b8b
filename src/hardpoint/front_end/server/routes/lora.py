"""LoRA load and unload, present with VLLM_ALLOW_RUNTIME_LORA_UPDATING."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import PlainTextResponse

from hardpoint.front_end.server.errors import ApiError
from hardpoint.front_end.server.protocol.adapters import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from hardpoint.front_end.server.protocol.base import ErrorResponse
from hardpoint.front_end.server.routes.common import context_of, require_json

router = APIRouter(dependencies=[Depends(require_json)])
_ERRORS: dict[int | str, dict[str, Any]] = {400: {"model": ErrorResponse}, 404: {"model": ErrorResponse}}


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse, responses=_ERRORS)
async def load_lora_adapter(request: LoadLoRAAdapterRequest, raw_request: Request) -> PlainTextResponse:
    """Serve the adapter in a folder under a name."""
    if request.is_3d_lora_weight:
        raise ApiError("adapters of experts are not supported", kind="InvalidUserInput", param="is_3d_lora_weight")
    await context_of(raw_request).adapters.load(request.lora_name, request.lora_path, request.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, responses=_ERRORS)
async def unload_lora_adapter(request: UnloadLoRAAdapterRequest, raw_request: Request) -> PlainTextResponse:
    """Serve an adapter no more."""
    await context_of(raw_request).adapters.unload(request.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")
